// Mathematics by KaTeX; figures in the mode that the page is in, whatever the system's; a name and a way in by keyboard
// for what the theme leaves without.
(function () {
  function math() {
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
  function keyboard() {
    document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
    const watch = new ResizeObserver(function (changed) {
      changed.forEach(function ({ target }) {
        const scrolls = target.scrollWidth > target.clientWidth || target.scrollHeight > target.clientHeight;
        if (scrolls) target.tabIndex = 0;
      });
    });
    document.querySelectorAll("pre > code, .md-typeset__scrollwrap, .md-typeset :is(figure, p:has(> picture))").forEach((box) => watch.observe(box));
  }
  window.addEventListener("load", keyboard); // by then the theme has laid its boxes around wide tables
  document.addEventListener("DOMContentLoaded", function () {
    math();
    mode();
    new MutationObserver(mode).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  });
})();
