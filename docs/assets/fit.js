// "Will it fit?". Every number is computed by the package's own Python, which runs in a worker (fit-worker.js); this file
// reads the form, keeps the choice in the address, and shows what Python wrote. The page comes with its first answer.
(function () {
  const root = document.getElementById("fit"), page = document.getElementById("fit-data");
  if (!root || !page) return;
  const given = JSON.parse(page.textContent);
  const find = (selector) => root.querySelector(selector);
  const form = find("form"), verdict = find(".verdict"), bars = find(".bars"), rest = find(".rest"), legends = find(".legends");
  const strange = find(".strange"), done = find(".done");
  const control = (name) => document.getElementById(`fit-${name}`);
  const OWN = /^\d+(\.\d+)?\s*(gib|gb|mib)(:\d+\.\d+)?$/i; // an amount of memory, as --gpu takes it
  const ALWAYS = ["model", "card", "batch", "tokens"]; // these stand in each link, all others where they differ
  root.classList.add("live"); // without a script there is no form
  let state = given.default, pinned = null, editing = "", known = null, searching = "", reason = "";

  const el = (tag, attributes = {}, ...inside) => {
    const made = document.createElement(tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    made.append(...inside);
    return made;
  };
  const button = (kind, says, then) => {
    const made = el("button", { type: "button", class: kind }, says);
    made.addEventListener("click", then);
    return made;
  };

  // The choice and the address ------------------------------------------------------------------------------------------

  function read(text) { // a link's choice, and what it says that is not possible here
    const found = { ...given.default }, said = [];
    let kept = null;
    for (const [name, value] of new URLSearchParams(text)) {
      if (name === "a") { kept = read(value).found; continue; }
      const field = Object.hasOwn(given.fields, name);
      if (field) found[name] = taken(name, value, found[name]);
      if (field && same(found[name], value)) continue;
      const instead = field ? `, so this answers for ${name}=${found[name]}` : "";
      said.push(`The link says ${name.slice(0, 40)}=${value.slice(0, 40)}, which is not possible here${instead}.`);
    }
    const names = [...new URLSearchParams(text).keys()];
    if (!names.includes("set") && names.some((name) => given.switches.includes(name))) found.set = "own"; // they were chosen
    return { found, kept, said };
  }
  const same = (one, other) => one === other || (one !== "" && other !== "" && Number(one) === Number(other));
  function taken(name, value, otherwise) {
    const field = given.fields[name];
    if (name === "config") return value;
    if (name === "model") return given.models.includes(value) ? value : otherwise;
    if (name === "card") {
      const card = Object.hasOwn(given.aliases, value) ? given.aliases[value] : value;
      return given.cards.includes(card) || OWN.test(card) ? value : otherwise;
    }
    if (field.values.length) {
      return field.values.includes(value) || (field.number && /^[1-9]\d{0,6}$/.test(value)) ? value : otherwise;
    }
    if (name === "mean" && value === "") return value;
    return within(name, value, otherwise);
  }
  function within(name, text, otherwise) {
    const { low, high, whole } = given.fields[name], number = Number(text);
    if (!Number.isFinite(number) || text === "") return otherwise;
    return String(Math.min(high, Math.max(low, whole ? Math.round(number) : number)));
  }
  function link(choice, kept) {
    const names = Object.keys(choice).filter((name) => ALWAYS.includes(name) || choice[name] !== given.default[name]);
    const found = new URLSearchParams(names.map((name) => [name, choice[name]]));
    if (kept) found.set("a", link(kept));
    return String(found);
  }

  // Python ----------------------------------------------------------------------------------------------------------------

  let worker = null, ready = false, asked = null, number = 0; // only the newest question is answered

  function start() {
    ready = false;
    worker = new Worker(new URL("assets/fit-worker.js", document.baseURI), { type: "module" });
    worker.onmessage = ({ data }) => {
      if (data.ready) { ready = true; return; }
      if (data.failed && data.id === undefined) return stopped(data.failed);
      if (data.id !== asked?.id) return;
      if (data.step) return asked.step?.(...data.step);
      const { then, failed } = asked;
      asked = null;
      seeks("");
      if (data.failed) failed(data.failed);
      else then(JSON.parse(data.found));
    };
    worker.onerror = () => stopped("a file of the page could not be loaded");
  }
  function ask(job, what, then, more = {}) {
    drop();
    if (!worker) start();
    asked = { id: ++number, then, failed: (why) => fail(`Python could not answer: ${why}.`), ...more };
    worker.postMessage({ id: number, job, given: what });
  }
  function drop() { // what Python is doing is not wanted any more
    if (asked) worker?.postMessage({ id: ++number });
    asked = null;
    seeks("");
  }
  function stopped(why) { // nothing of it is kept, so that "Try again" loads all of it again
    worker.terminate();
    worker = asked = null;
    seeks("");
    done.textContent = "";
    fail(`Python could not be loaded: ${why}.`);
  }
  function fail(why) { // nothing of an earlier answer stays: it would be another choice's
    const again = button("md-button", "Try again", () => go(state, { keep: false }));
    if (!root.dataset.changed) { // the answer that came with the page is still right
      return strange.replaceChildren(`${why} So this page shows the answer for its first choice only. `, again);
    }
    clear("failed");
    verdict.replaceChildren(el("strong", { class: "not" }, `${why} So there is no answer. `), again);
  }
  function clear(mode) {
    root.classList.remove("failed", "refused", "waiting", "busy");
    if (mode) root.classList.add(mode);
    delete root.dataset.found;
    delete root.dataset.state;
    delete root.dataset.beside;
  }

  // From a choice to its answer -------------------------------------------------------------------------------------------

  function go(choice, { keep = true, field = "", said = [], says = "", at = "" } = {}) {
    const text = link(choice, pinned);
    if (keep && text !== location.hash.slice(1)) { // keys pressed in one field are one step back
      history[field && field === editing ? "replaceState" : "pushState"](null, "", `#${text}`);
    }
    editing = field;
    state = choice;
    known = null;
    fill();
    besides({});
    strange.textContent = said.join(" ");
    done.textContent = says;
    done.title = "";
    form.querySelectorAll(".wrong").forEach((row) => row.classList.remove("wrong"));
    form.querySelectorAll(".error").forEach((line) => line.remove());
    if (at) wrong(at, says);
    if (text === link(given.default) && !pinned && !root.dataset.changed) return first();
    root.dataset.changed = "true";
    clear(ready ? "busy" : "waiting");
    if (!ready) verdict.replaceChildren("Starting Python in your browser ...");
    const began = performance.now();
    ask("answer", { choice, pinned }, (found) => {
      root.dataset.ms = (performance.now() - began).toFixed(1);
      show(found);
    });
  }
  function first() { // it came with the page
    drop();
    clear("");
    finish(given.first);
    if (!worker) start();
    aside();
  }
  function show(found) {
    clear(found.refused ? "refused" : "");
    reason = found.refused || "";
    const changes = Object.entries(found.changes || {});
    if (changes.length) { // with the switches of the form it would not fit, so Python has searched others
      state = { ...state, ...found.changes };
      history.replaceState(null, "", `#${link(state, pinned)}`);
      fill();
      const why = found.data.verdict === "fits" ? "So that it fits" : "No set fits with a margin; this one needs least";
      done.textContent = `${why}: ${changes.map(([name, value]) => words(name, value)).join("; ")}.`;
    }
    if (found.refused) {
      verdict.replaceChildren(el("strong", { class: "not", title: reason }, "Not possible. "), found.says);
      found.at.forEach((name) => wrong(name, found.says));
    } else {
      const open = [...rest.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent);
      verdict.innerHTML = found.html.verdict; // written by tools/fit/show.py, which escapes all names
      bars.innerHTML = found.html.bar;
      legends.innerHTML = found.html.legend;
      rest.innerHTML = found.html.rest;
      rest.querySelectorAll("summary").forEach((line) => { line.parentElement.open = open.includes(line.textContent); });
    }
    finish(found);
    aside();
  }
  function wrong(name, says) { // a refusal stands at its field, too
    const row = control(name)?.closest(".field, .switch");
    if (!row) return;
    row.classList.add("wrong");
    row.append(el("p", { class: "error" }, says));
    const group = row.closest("details");
    if (group) group.open = true;
  }
  function finish(found) {
    if (found.commands) commands(found.commands);
    root.dataset.found = JSON.stringify(found.refused ? { refused: found.refused } : found.data);
    root.dataset.state = link(state, pinned);
  }
  function aside() { // what other values would change takes longer, so it waits until nothing else was asked for a while
    const mine = state;
    setTimeout(() => mine === state && !asked && !known && ask("beside", { choice: mine }, (found) => {
      known = found;
      besides(found);
      root.dataset.beside = link(state, pinned);
    }, { failed: () => {} }), 200);
  }
  function commands({ plan, train }) {
    find("code.plan").textContent = plan.replaceAll(" --set", " \\\n  --set");
    const own = ["config.json", "numbers"].includes(state.model), text = find(".get span");
    find("[data-do=config]").hidden = !own;
    find(".get .notebook").hidden = own;
    text.textContent = own ? "To train, name the model's hub id: a config.json has no weights."
      : given.colab[state.card] ? ", and open it in Colab (File, Upload notebook)." : ". Colab has no such card.";
    if (!own) find(".get .notebook").href = `data:application/x-ipynb+json;charset=utf-8,${encodeURIComponent(notebook(plan, train))}`;
  }
  function notebook(plan, train) {
    const code = (source) => ({ cell_type: "code", metadata: {}, execution_count: null, outputs: [], source });
    const colab = given.colab[state.card] ? { gpuType: given.colab[state.card] } : {};
    return JSON.stringify({ nbformat: 4, nbformat_minor: 4, cells: [code(given.install), code(`!${plan}`), code(`!${train} --resume`)],
      metadata: { accelerator: "GPU", colab, kernelspec: { display_name: "Python 3", language: "python", name: "python3" } } });
  }

  // The form --------------------------------------------------------------------------------------------------------------

  function fill() { // what is being typed stays as it is
    for (const [name, value] of Object.entries(state)) {
      const box = control(name), numbers = control(`${name}-number`);
      if (name === "config") { if (reduced(box.value) !== value) box.value = value; continue; }
      if (name === "card") { own(value); continue; }
      if (box === document.activeElement && box.type === "number" && same(box.value, value)) continue;
      if (box.type === "checkbox") box.checked = value === "true";
      else if (numbers) {
        const counts = !given.fields[name].values.includes(value);
        box.value = counts ? "number" : value;
        numbers.hidden = !counts;
        if (counts && numbers !== document.activeElement) numbers.value = value;
      } else box.value = value;
    }
    const slider = control("tokens-slider");
    if (slider !== document.activeElement) slider.value = Math.log2(state.tokens);
    slider.setAttribute("aria-valuetext", `${state.tokens} tokens`);
    form.querySelectorAll("[data-beside]").forEach((row) => {
      const [name, value] = row.dataset.beside.split("=");
      row.hidden = state[name] !== value;
    });
    find("[data-do=pin]").textContent = pinned ? "Stop comparing" : "Compare with this (A)";
  }
  function own(card) {
    const name = Object.hasOwn(given.aliases, card) ? given.aliases[card] : card, listed = given.cards.includes(name);
    control("card").value = listed ? name : "other";
    form.querySelector(".own").hidden = listed;
    const [, amount, unit, , capability] = card.match(/^([\d.]+)\s*(gib|gb|mib)(:(\d+\.\d+))?$/i) || [];
    if (listed || control("gib") === document.activeElement) return;
    control("gib").value = Number((amount * { gib: 1, gb: 1e9 / 2 ** 30, mib: 1 / 1024 }[unit.toLowerCase()]).toFixed(4));
    control("capability").value = capability || "8.6";
  }
  function reduced(text) { // a pasted config without what no estimate reads, so that the link stays short
    const keep = (config) => Object.fromEntries(Object.entries(config).filter(([name]) => given.read.includes(name))
      .map(([name, value]) => [name, name === "text_config" && value && typeof value === "object" ? keep(value) : value]));
    try {
      const config = JSON.parse(text);
      return config && typeof config === "object" && !Array.isArray(config) ? JSON.stringify(keep(config)) : text;
    } catch {
      return text.slice(0, 4000); // Python says what is wrong with it
    }
  }
  function chosen(target) { // what a control says, as fields of a choice; null while it says nothing yet
    const name = target.id.replace(/^fit-/, ""), of = name.replace(/-number$/, "");
    if (name === "config") return { config: reduced(target.value) };
    if (name === "tokens-slider") return { tokens: String(Math.round(2 ** target.value)) };
    if (["gib", "capability"].includes(name) || (name === "card" && target.value === "other")) {
      return Number(control("gib").value) > 0 ? { card: `${control("gib").value}GiB:${control("capability").value}` } : null;
    }
    if (target.type === "checkbox") return switched(name, String(target.checked));
    if (target.type === "number") {
      if (name === "mean" && target.value === "") return { mean: "" };
      return target.value === "" || !target.validity.valid ? null : { [of]: String(Number(target.value)) };
    }
    if (target.value === "number") return { [of]: control(`${of}-number`).value || (of === "tiled_mlp" ? "2048" : "8") };
    return switched(name, target.value);
  }
  function switched(name, value) { // switches that cannot stay on without this one go off with it
    const also = known?.values[name]?.[value]?.also || [];
    return { ...Object.fromEntries(also.map((other) => [other, given.off[other]])), [name]: value };
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  const label = (name) => control(name).labels[0].textContent.split(/ \(|:/)[0];
  function words(name, value) { // a choice in the words of the form
    const box = control(name), option = box.options && [...box.options].find((one) => one.value === value);
    return `${label(name)}: ${box.type === "checkbox" ? { true: "on", false: "off" }[value] : option?.textContent || value}`;
  }
  const kernels = (card) => { // precision and kernels as the recipe has them on this card
    const name = Object.hasOwn(given.aliases, card) ? given.aliases[card] : card;
    return given.kernels[parseFloat(given.capability[name] || card.split(":")[1] || "8.6") < 8 ? "old" : "new"];
  };
  function take(target) {
    if (searching) stop();
    const fields = target.type !== "file" && chosen(target);
    if (!fields || Object.keys(fields).every((name) => state[name] === fields[name])) return;
    const also = Object.keys(fields).slice(0, -1).filter((name) => state[name] !== fields[name]);
    if (fields.card) { // what the reader has set otherwise stays
      const before = kernels(state.card), after = kernels(fields.card);
      Object.keys(after).forEach((name) => { if (state[name] === before[name]) fields[name] = after[name]; });
    } else if (!fields.set && Object.keys(fields).some((name) => given.switches.includes(name))) fields.set = "own";
    go({ ...state, ...fields }, { field: target.id, says: also.length ? `Also switched off: ${also.map(label).join(", ")}.` : "" });
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => take(target));
  form.addEventListener("change", ({ target }) => {
    if (target.matches("select, [type=checkbox]")) take(target); // some browsers and tools send no input event for these
    editing = "";
    const name = target.name;
    if (target.type === "file") return target.files[0]?.text().then((text) => {
      control("config").value = text;
      go({ ...state, config: reduced(text) });
    });
    if (target.type !== "number" || !given.fields[name]?.high || target.validity.valid) return;
    const [low, high] = [given.fields[name].low, given.fields[name].high].map((end) => end.toLocaleString("en"));
    const value = within(name, target.value, state[name]); // a number is brought into its range
    target.value = value;
    go({ ...state, [name]: value }, { says: `${label(name)} can be ${low} to ${high}.`, at: name });
  });

  // What other values would change, and which cannot be -------------------------------------------------------------------

  function besides({ values = {}, longest = null, context = 0 }) {
    given.besides.forEach((name) => {
      const box = control(name), says = control(`${name}-says`), refused = [];
      const options = box.type === "checkbox" ? [box] : [...box.options];
      says.replaceChildren();
      options.forEach((option) => {
        const value = option === box ? String(!box.checked) : option.value, one = values[name]?.[value];
        const short = ["model", "card"].includes(name) ? value : option.textContent;
        const said = option === box ? `switch it ${box.checked ? "off" : "on"}` : `choose ${short}`;
        const here = option === box ? box === document.activeElement : option.selected; // this one must stay as it is
        option.disabled = Boolean(one?.refused) && !root.classList.contains("refused") && !here;
        option.title = option.disabled ? one.refused : "";
        if (option.disabled) refused.push([option === box ? said.slice(10) : short, one.why, { ...one.instead, [name]: value }]);
        if (one?.words) says.append(effect(said, one));
        if (option === box && one?.says) says.append(el("div", {}, one.says));
      });
      if (refused.length) says.append(impossible(refused));
    });
    if (root.classList.contains("refused")) mends(values);
    mark(longest, state.packing === "true" ? 0 : context);
  }
  function effect(said, { words: changes, also = [], link: more }) { // what else would go off is counted, so it is named
    const others = also.length ? ` (${also.map(label).join(", ")} would go off, too)` : "";
    const line = el("div", {}, `If you ${said}: ${changes}${others}`);
    if (more) line.append(" ", el("a", { href: more }, "measured"));
    return line;
  }
  function impossible(refused) { // the reasons, and a button where one more setting makes it possible
    const names = refused.map(([label]) => label), short = names.length < 4 ? names.join(", ") : names.length;
    return el("details", {}, el("summary", {}, `Not possible here: ${short}`), ...refused.map(([label, why, fields], at) => {
      const [other, value] = Object.entries(fields)[0], before = refused[at - 1];
      const same = before?.[1].replaceAll(before[0], label) === why;
      const line = el("p", {}, same ? `${label}: for the same reason. ` : `${label}: ${why}. `);
      if (Object.keys(fields).length > 1) line.append(button("link", `Choose it, with ${words(other, value)}`, () => go({ ...state, ...fields })));
      return line;
    }));
  }
  function mends(values) { // single changes with which a refused choice works
    const advised = ([name, value]) => reason.includes(`${name}=${value}`); // what the refusal says comes first
    const found = Object.entries(values).flatMap(([name, others]) => Object.entries(others)
      .filter(([, one]) => one.mends).map(([value]) => [name, value])).sort((one, other) => advised(other) - advised(one)).slice(0, 4);
    done.replaceChildren(...found.map(([name, value]) => button("md-button", `Set ${words(name, value)}`, () => go({ ...state, [name]: value }))));
  }
  function mark(longest, context) { // the longest row that fits, on the slider
    const at = form.querySelector(".longest"), says = form.querySelector(".longest-says");
    at.hidden = !longest || longest < 8;
    says.textContent = longest === null ? "" : longest < 8 ? "No row fits." : `Longest row that fits: ${longest.toLocaleString("en")} tokens. `;
    if (at.hidden) return;
    at.style.left = `${(100 * (Math.log2(longest) - 3)) / 17}%`;
    const [most, take] = context && context < longest ? [context, `Set the length to the model's context, ${context.toLocaleString("en")}`]
      : [longest, `Set the length to ${longest.toLocaleString("en")} (predicted)`];
    says.append(button("link", take, () => go({ ...state, tokens: String(most) })));
  }

  // Buttons ---------------------------------------------------------------------------------------------------------------

  const copy = (text, says) => navigator.clipboard.writeText(text).then(() => { done.textContent = says; },
    () => { done.textContent = "The browser does not let this page copy."; });
  function search(aim, { detail }) {
    if (detail > 1) return; // a double click does not stop what it began
    if (searching === aim) return stop();
    const count = el("span", { "aria-hidden": "true" }), share = el("progress", { "aria-label": "sets of switches tried" });
    done.replaceChildren("Searching ... ", share, count);
    ask("search", { choice: state, aim }, (found) => {
      if (!found.refused && found.set.length) {
        const set = Object.entries(found.changes).map(([name, value]) => words(name, value)).join("; ");
        go({ ...state, ...found.changes }, { says: `Set: ${set}.` });
        done.title = found.set.join(", ");
        return;
      }
      done.textContent = found.says || (aim === "fit" ? "It fits already: nothing was changed." : "Nothing that fits is faster.");
      (found.ways || []).forEach(({ says, button: label, changes }) => done.append(
        el("p", {}, `${says} `, button("md-button", label, () => go({ ...state, ...changes })))));
      aside();
    }, { step: (tried, every) => {
      if (!every) return;
      Object.assign(share, { value: tried, max: every });
      count.textContent = ` ${tried.toLocaleString("en")} of ${every.toLocaleString("en")} sets`;
    } });
    seeks(aim);
  }
  function seeks(aim) { // the button of the running search stops it
    searching = aim;
    root.setAttribute("aria-busy", String(Boolean(aim)));
    root.querySelectorAll("[data-do=fit], [data-do=fastest]").forEach((one) => {
      one.dataset.says ??= one.textContent;
      one.style.minWidth ||= `${Math.ceil(one.getBoundingClientRect().width)}px`; // so that the other buttons stay where they are
      one.textContent = one.dataset.do === aim ? "Stop" : one.dataset.says;
    });
  }
  function stop() {
    drop();
    done.textContent = "Stopped: nothing was changed.";
    aside();
  }
  document.addEventListener("keydown", ({ key }) => { if (key === "Escape" && searching) stop(); });
  const DO = {
    fit: (event) => search("fit", event),
    fastest: (event) => search("fastest", event),
    off: () => go({ ...state, ...given.off }),
    reset: () => { pinned = null; go(given.default); },
    pin: () => { pinned = pinned ? null : state; go({ ...state }); },
    link: () => copy(new URL(`#${link(state, pinned)}`, location.href).href, "The link is copied."),
    command: () => copy(find("code.plan").textContent.replaceAll(" \\\n  ", " "), "The command is copied."),
    config: () => {
      const config = state.model === "numbers" ? JSON.stringify(numbers(), null, 2) : control("config").value;
      el("a", { href: `data:application/json,${encodeURIComponent(config)}`, download: "config.json" }).click();
    },
  };
  const numbers = () => ({ model_type: "llama", ...Object.fromEntries(Object.entries(given.config).map(([name, field]) => [field, Number(state[name])])),
    tie_word_embeddings: state.tied === "true", max_position_embeddings: 131072 });
  root.addEventListener("click", (event) => DO[event.target.closest("[data-do]")?.dataset.do]?.(event));

  // Groups of the form: on a phone folded at first; what a reader opens or folds stays so.
  const groups = [...form.querySelectorAll("details.group")], wide = matchMedia("(min-width: 60em)").matches;
  let folds = {};
  try { folds = JSON.parse(localStorage.getItem("fit-groups")) || {}; } catch { /* no storage: not kept */ }
  groups.forEach((group) => {
    group.open = folds[group.id] ?? wide;
    group.querySelector("summary").addEventListener("click", () => {
      folds[group.id] = !group.open;
      try { localStorage.setItem("fit-groups", JSON.stringify(folds)); } catch { /* not kept */ }
    });
  });

  // Begin -----------------------------------------------------------------------------------------------------------------

  function follow() {
    const { found, kept, said } = read(location.hash.slice(1));
    pinned = kept;
    go(found, { keep: false, said });
  }
  function still(says) { // without Python: the first answer, and why there is no other
    root.classList.add("still");
    strange.textContent = says;
    form.querySelectorAll("fieldset, button").forEach((one) => { one.disabled = true; });
    finish(given.first);
    fill();
  }
  const instead = "So this page shows the answer for its first choice only";
  if (location.protocol === "file:") {
    still(`The page was opened as a file, and browsers start no Python for files. ${instead}. Serve it with: ${given.host}, then open http://localhost:8000/fit.html.`);
  } else if (given.missing) {
    still(`This site was built without Python for browsers. ${instead}; cria plan does the rest.`);
  } else {
    window.addEventListener("popstate", follow);
    follow();
  }
})();
