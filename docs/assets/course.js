// Mathematics by KaTeX; figures in the mode that the page is in, whatever the system's; a name and a way in by keyboard
// for what the theme leaves without.
(function () {
  // Formulas and boxes are looked at when a reader comes near them, because hundreds at once would block a phone. Paper
  // gets all of them.
  function near(selector, act) {
    const left = new Set(document.querySelectorAll(selector));
    const seen = new IntersectionObserver((changed) => changed.forEach(({ target, isIntersecting }) => isIntersecting && take(target)), { rootMargin: "800px" });
    function take(target) {
      seen.unobserve(target);
      if (left.delete(target)) act(target);
    }
    left.forEach((found) => seen.observe(found));
    window.addEventListener("beforeprint", () => left.forEach(take));
  }
  function math() {
    if (!window.renderMathInElement) return; // KaTeX is loaded only on pages that have mathematics
    const delimiters = [
      { left: "\\[", right: "\\]", display: true },
      { left: "\\(", right: "\\)", display: false },
    ];
    near(".arithmatex", (formula) => renderMathInElement(formula, { delimiters, throwOnError: false }));
  }
  function mode() {
    const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
    document.querySelectorAll('picture > source[srcset$="-dark.svg"]').forEach(function (source) {
      source.media = dark ? "all" : "not all";
    });
  }
  // A box that scrolls can be reached by keyboard, and shows whether there is more to the right. All boxes are measured
  // before the first is changed, so that the browser lays the page out once.
  function look(boxes) {
    const found = boxes.map((box) => ({
      box,
      wide: box.scrollWidth - box.clientWidth > 1,
      high: box.matches("pre > code") && box.scrollHeight > box.clientHeight,
      more: box.scrollLeft < box.scrollWidth - box.clientWidth - 2,
      below: box.scrollTop < box.scrollHeight - box.clientHeight - 2,
    }));
    found.forEach(function ({ box, wide, high, more, below }) {
      if (wide || high) box.tabIndex = 0;
      if (high) box.dataset.below = below;
      else delete box.dataset.below;
      if (wide) box.dataset.more = more;
      else delete box.dataset.more;
    });
  }
  function keyboard() {
    document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
    // The theme calls each copy button and each level of the table of contents a navigation of its own.
    document.querySelectorAll("nav.md-code__nav, .md-nav--secondary nav").forEach(function (part) {
      part.removeAttribute("aria-label");
      part.setAttribute("role", "none");
    });
    const boxes = "pre > code, .md-typeset__scrollwrap, .md-typeset :is(picture, .scrolls), div.arithmatex";
    const watch = new ResizeObserver((changed) => look(changed.map(({ target }) => target)));
    near(boxes, function (box) {
      watch.observe(box);
      box.addEventListener("scroll", () => look([box]), { passive: true });
    });
  }
  window.addEventListener("load", keyboard); // by then the theme has laid its boxes around wide tables
  document.addEventListener("DOMContentLoaded", function () {
    math();
    mode();
    new MutationObserver(mode).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  });
})();
