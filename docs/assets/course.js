// Mathematics by KaTeX; figures in the mode that the page is in, whatever the system's; a name and a way in by keyboard
// for what the theme leaves without.
(function () {
  function math() {
    if (!window.renderMathInElement) return; // KaTeX is loaded only on pages that have mathematics
    renderMathInElement(document.body, {
      delimiters: [
        { left: "\\[", right: "\\]", display: true },
        { left: "\\(", right: "\\)", display: false },
      ],
      throwOnError: false,
    });
  }
  function mode() {
    const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
    document.querySelectorAll('picture > source[srcset$="-dark.svg"]').forEach(function (source) {
      source.media = dark ? "all" : "not all";
    });
  }
  // A box that scrolls can be reached by keyboard, and shows whether there is more to the right.
  function look(box) {
    const wide = box.scrollWidth - box.clientWidth;
    if (wide > 1 || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
    if (wide > 1) box.dataset.more = box.scrollLeft < wide - 2;
    else delete box.dataset.more;
  }
  function keyboard() {
    document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
    // The theme calls each copy button and each level of the table of contents a navigation of its own.
    document.querySelectorAll("nav.md-code__nav, .md-nav--secondary nav").forEach(function (part) {
      part.removeAttribute("aria-label");
      part.setAttribute("role", "none");
    });
    const boxes = "pre > code, .md-typeset__scrollwrap, .md-typeset :is(picture, .scrolls)";
    const watch = new ResizeObserver((changed) => changed.forEach(({ target }) => look(target)));
    document.querySelectorAll(boxes).forEach(function (box) {
      watch.observe(box);
      box.addEventListener("scroll", () => look(box), { passive: true });
    });
  }
  window.addEventListener("load", keyboard); // by then the theme has laid its boxes around wide tables
  document.addEventListener("DOMContentLoaded", function () {
    math();
    mode();
    new MutationObserver(mode).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  });
})();
