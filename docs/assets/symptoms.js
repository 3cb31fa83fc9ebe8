// A field above the symptoms: paste an error message, and the entries that have little in common with it are hidden.
// Without JavaScript there is no field, and the page shows every entry.
(function () {
  const place = document.querySelector(".symptom-filter");
  if (!place) return;
  const headings = [...document.querySelectorAll("article h3[id]")];
  const words = (text) => new Set(text.toLowerCase().match(/[a-z0-9_]{3,}/g) || []);
  // An entry is its heading and all that follows, up to the next heading.
  const entries = headings.map(function (heading) {
    const parts = [heading];
    let next = heading.nextElementSibling;
    while (next && !/^H[23]$/.test(next.tagName)) { parts.push(next); next = next.nextElementSibling; }
    return { heading, parts, title: words(heading.textContent), all: words(parts.map((part) => part.textContent).join(" ")) };
  });
  // A word that many entries have, such as "the" or "memory", says little.
  const rarity = (word) => {
    const having = entries.filter(({ all }) => all.has(word)).length;
    return having ? Math.log(entries.length / having) : 0;
  };

  const field = document.createElement("textarea");
  field.id = "symptom-words";
  field.rows = 2;
  field.spellcheck = false;
  field.placeholder = "CUDA out of memory";
  const label = document.createElement("label");
  label.htmlFor = field.id;
  label.textContent = "Paste your error message";
  const found = document.createElement("p");
  found.setAttribute("role", "status");
  place.append(label, field, found);

  function show(least, scores) {
    let shown = 0;
    entries.forEach(function ({ parts }, n) {
      const hide = scores[n] < least;
      parts.forEach((part) => { part.hidden = hide; });
      if (!hide) shown += 1;
    });
    // A section without an entry has nothing to head.
    document.querySelectorAll("article h2[id]").forEach(function (section) {
      let next = section.nextElementSibling, any = false;
      while (next && next.tagName !== "H2") { any ||= next.tagName === "H3" && !next.hidden; next = next.nextElementSibling; }
      section.hidden = !any;
    });
    return shown;
  }
  function filter() {
    const asked = [...words(field.value)];
    // A word in a title counts three times, because the titles are the messages themselves.
    const scores = entries.map(({ title, all }) =>
      asked.reduce((sum, word) => sum + (all.has(word) ? rarity(word) * (title.has(word) ? 3 : 1) : 0), 0));
    const best = Math.max(0, ...scores);
    if (!best) {
      show(0, scores);
      found.textContent = asked.length ? "No entry has a word of it, so all are shown." : "";
      return;
    }
    const shown = show(best / 2, scores);
    found.textContent = `${shown} of ${entries.length} entries. Empty the field to see all.`;
  }
  field.addEventListener("input", filter);
  // A link to an entry that is hidden shows all entries again.
  window.addEventListener("hashchange", function () {
    if (!document.getElementById(decodeURIComponent(location.hash.slice(1)))?.hidden) return;
    field.value = "";
    filter();
    document.getElementById(decodeURIComponent(location.hash.slice(1))).scrollIntoView();
  });
})();
