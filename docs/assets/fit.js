// "Will it fit?". No formula of the bill is here: tools/fit.py exports the estimate as tables of polynomials, and this
// looks up the parts of each moment of a step, puts in the numbers, adds, and takes the largest. The state is the URL's.
(function () {
  const root = document.getElementById("fit");
  if (!root) return;
  const base = root.dataset.tables;
  const GIB = 2 ** 30;
  const NUMBERS = {
    batch: ["Rows of a micro-batch", 1, 256], tokens: ["Tokens of a row", 8, 131072],
    gradient_accumulation: ["Micro-batches of an optimizer step", 1, 1024],
    rows: ["Training rows", 1, 10000000], epochs: ["Epochs", 0.1, 1000],
  };
  const COLAB = { t4: "T4", l4: "L4", a100: "A100" }; // its names for the cards it has
  const GROUPS = [
    ["weights", /^weights: /], ["gradients", /^gradients|^(embedding|head)('s)? gradient/], ["optimizer states", /^optimizer/],
    ["activations", /^(blocks?: |open block|saved)/], ["logits", /./], ["batch", /^batch/], ["the card's own", /^(CUDA|cuBLAS)/],
    ["reserved, not used", /^reserved/],
  ];
  const models = {};
  let index, state, asked = 0;

  const el = (tag, attributes = {}, ...inside) => {
    const made = document.createElement(tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    made.append(...inside);
    return made;
  };
  // A table comes as a script, because a page that was opened as a file may not fetch. It puts itself into fitTables.
  const tables = (window.fitTables = {});
  const get = (name) => new Promise((found, failed) => {
    const script = el("script", { src: `${base}/${name}.js` });
    script.onload = () => (tables[name] ? found(tables[name]) : failed());
    script.onerror = failed;
    document.head.append(script);
  }).catch(() => { throw new Missing(name); });
  class Missing extends Error {}
  const words = (name) => name.replaceAll("_", " ");
  const key = (fields, of) => fields.map((field) => String(of[field])).join(",");
  const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;
  const gib = (bytes) => (bytes < GIB ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : `${(bytes / GIB).toFixed(2)} GiB`);

  // Times and money: the words of cria_tricks/common/units.py ---------------------------------------------------------------

  const rounded = (number) => Math.floor(number + 0.5);
  const grouped = (number) => rounded(number).toLocaleString("en");
  function short(number, unit) {
    const tenths = rounded(10 * number);
    return tenths < 100 ? `${Math.floor(tenths / 10)}.${tenths % 10} ${unit}` : `${rounded(number)} ${unit}`;
  }
  function duration(seconds) {
    const minutes = rounded(seconds / 60), days = seconds / 86400;
    if (rounded(seconds * 10) === 0) return "less than 0.1 s";
    if (rounded(seconds) < 60) return short(seconds, "s");
    if (minutes < 120) return short(seconds / 60, "min");
    if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
    return days < 730 ? `${rounded(days)} days` : `${grouped(days / 365)} years`;
  }
  function joined(first, last) { // the ends of a range; the unit stands once where both share it
    if (first === last) return first;
    const [number, ...unit] = first.split(" ");
    const same = unit.join(" ") === last.split(" ").slice(1).join(" ") && !unit.join(" ").includes("h");
    return `${same && unit.length ? number : first} to ${last}`;
  }
  const between = (low, high) => joined(duration(low), duration(high));
  const moneyBetween = (low, high) => money(low) === money(high) ? money(low) : `${money(low)} to ${money(high)}`;
  function money(usd) {
    const cents = rounded(100 * usd);
    if (usd < 0.01) return "less than a cent";
    return cents < 10000 ? `$${Math.floor(cents / 100)}.${String(cents % 100).padStart(2, "0")}` : `$${grouped(usd)}`;
  }

  // What a state costs ---------------------------------------------------------------------------------------------

  function lettersOf(s) { // the page's numbers, and the two roundings that RULES of memory/formula.py names
    const letters = { B: s.batch, T: s.tokens, k: s.gradient_accumulation };
    letters.m = Math.min(index.chunk, s.batch * (s.tokens - 1));
    letters.c = Math.ceil((s.batch * s.tokens) / index.chunk);
    return letters;
  }

  function evaluate(s, model) {
    const card = index.cards[s.card], letters = lettersOf(s), known = new Map();
    const about = index.models[s.model], positions = s.tokens + (s.peft === "prompt_tuning" ? index.prompt : 0);
    const of = { ...s, new: card.new, several: s.batch > 1, accumulates: s.gradient_accumulation > 1,
      windowed: about.window > 0 && about.window <= positions };
    const refused = [...index.refused, ...about.refused].filter(({ when }) => Object.keys(when).every((field) => of[field] === when[field]));
    if (refused.length) return { refused: refused.map(({ says }) => says.replace("{B}", s.batch)) };
    Object.entries(model.classes).forEach(([name, table]) => { of[name] = table.is[key(table.by, of)]; });
    const value = (number) => {
      if (!known.has(number)) {
        const terms = Object.entries(model.formulas[number]);
        known.set(number, terms.reduce((sum, [term, coefficient]) =>
          sum + [...term].reduce((product, letter) => product * letters[letter], coefficient), 0));
      }
      return known.get(number);
    };
    const largest = (lists) => lists
      .map((rows) => rows.map(([name, number]) => ({ name: model.names[name], bytes: value(number) })).filter((row) => row.bytes))
      .map((rows) => ({ rows, bytes: rows.reduce((sum, row) => sum + row.bytes, 0) }))
      .reduce((best, one) => (one.bytes > best.bytes ? one : best));
    const part = (name) => { const { by, is } = model.parts[name]; return is[key(by, of)]; };
    const moments = Object.entries(index.moments)
      .map(([name, parts]) => [name, [...index.always, ...parts].map(part)])
      .filter(([, parts]) => parts.every(Boolean))
      .map(([name, parts]) => {
        const chosen = parts.map(largest);
        return { name, rows: chosen.flatMap(({ rows }) => rows), bytes: chosen.reduce((sum, { bytes }) => sum + bytes, 0) };
      });
    const peak = moments.reduce((best, one) => (one.bytes > best.bytes ? one : best));
    const { reserved } = index; // bill/bill.py
    const sum = (is) => peak.rows.filter(({ name }) => is(name)).reduce((total, { bytes }) => total + bytes, 0);
    const weights = sum((name) => name.startsWith("weights")), gradients = sum((name) => name === "gradients");
    const states = sum((name) => name === "optimizer states");
    const activations = peak.bytes - weights - gradients - states;
    const unused = Math.floor(reserved.activations * activations + reserved.gradients * gradients
      + reserved.states * states + reserved.weights * weights);
    const around = [...index.around.map(([name, bytes]) => ({ name, bytes })), { name: "reserved, not used", bytes: unused }];
    const needed = around.reduce((sum, { bytes }) => sum + bytes, peak.bytes);
    const { rates } = card; // null: not known, so no time is predicted
    const parts = rates && Object.values(model.times).map(({ by, is }) => is[key(by, of)].map(value));
    const busy = rates && parts.reduce((sum, [flops, bytes, link]) =>
      sum + Math.max(flops / rates.flops[s.precision], bytes / rates.memory) + link / rates.link, 0);
    // A card that is faster than the host starts kernels waits for it.
    const seconds = rates && Math.max(busy, parts.reduce((sum, part) => sum + part[3], 0) * rates.launch);
    const half = rates && Math.sqrt(rates.spread[s.precision]); // a range is its middle divided and multiplied by this
    const perToken = rates && seconds / (s.batch * s.tokens * s.gradient_accumulation);
    const hours = rates && (perToken * Math.ceil(s.rows * s.epochs) * s.tokens) / 3600;
    const least = needed - unused, fits = least <= card.bytes; // what does not fit has no price
    const prices = index.machines.filter((machine) => fits && machine.card === s.card)
      .map(({ name, price }) => ({ name, cost: hours * price, low: (hours * price) / half, high: hours * price * half }));
    return { refused: [], moment: peak.name, rows: peak.rows, around, peak: peak.bytes, needed, least,
      capacity: card.bytes, fits, tight: fits && needed > (1 - index.margin) * card.bytes, seconds, half,
      minutes: rates && hours * 60, prices, beyond: beyond(s), doubts: doubts(s) };
  }
  const beyond = (s) => !s.packing && s.tokens > (index.models[s.model].context || Infinity);
  function doubts(s) { // what speaks against a choice that fits, and is not refused
    const { context } = index.models[s.model], { says } = index, found = [];
    if (s.packing) found.push(says.packing);
    if (beyond(s)) found.push(says.context.replaceAll("{tokens}", s.tokens).replaceAll("{context}", context));
    if (s.activation_offload) found.push(says.host);
    return found;
  }

  // The state and the URL ------------------------------------------------------------------------------------------

  const capstone = () => ({ card: "t4", ...index.run, ...index.cards.t4.capstone });
  function read(text) { // a link's choice, and what it says that this page cannot answer for
    const found = capstone(), strange = [];
    for (const [name, value] of new URLSearchParams(text)) {
      const choices = name === "model" ? Object.keys(index.models) : name === "card" ? Object.keys(index.cards)
        : new Map(Object.entries(index.values)).get(name);
      const known = Object.hasOwn(found, name), number = known && NUMBERS[name];
      if (choices) found[name] = choices.find((choice) => String(choice) === value) ?? found[name];
      else if (number) found[name] = within(name, value, found[name]);
      const taken = number ? value !== "" && Number(value) === found[name] : known && String(found[name]) === value;
      if (!taken) {
        const instead = known ? `, so this answers for ${name}=${found[name]}` : "";
        strange.push(`The link says ${name.slice(0, 40)}=${value.slice(0, 40)}, which is not possible here${instead}.`);
      }
    }
    return { found, strange };
  }
  function within(name, text, otherwise) {
    const [, low, high] = NUMBERS[name], number = Number(text);
    if (!Number.isFinite(number) || text === "") return otherwise;
    return Math.min(high, Math.max(low, name === "epochs" ? number : Math.round(number)));
  }
  const said = (s) => String(new URLSearchParams(Object.entries(s).map(([name, value]) => [name, String(value)])));

  function settings(s) { // what differs from `cria train kwanzaa` on that card
    const { recipe } = index.cards[s.card], there = { ...index.run, ...recipe };
    const names = { model: "model", batch: "train.batch_size", tokens: "data.max_length", epochs: "train.epochs" };
    const found = Object.entries(names).filter(([name]) => s[name] !== there[name]).map(([name, full]) => `${full}=${s[name]}`);
    found.push(...Object.keys(recipe).filter((name) => s[name] !== there[name])
      .map((name) => `tricks.${name}=${s[name]}`));
    if (s.peft === "none") found.push("train.learning_rate=2e-5");
    if (s.peft === "lora") found.push(...index.models[s.model].lora);
    return found.map((setting) => `--set ${setting}`);
  }

  function notebook(s) {
    const code = (source) => ({ cell_type: "code", metadata: {}, execution_count: null, outputs: [], source });
    const set = settings(s).join(" ");
    const cells = [code(index.install), code(`!cria plan kwanzaa --gpu ${s.card} ${set}`.trim()),
      code(`!cria train kwanzaa ${set} --resume`.replace(/ +/g, " "))];
    const metadata = { accelerator: "GPU", colab: COLAB[s.card] ? { gpuType: COLAB[s.card] } : {},
      kernelspec: { display_name: "Python 3", language: "python", name: "python3" } };
    return JSON.stringify({ nbformat: 4, nbformat_minor: 4, metadata, cells });
  }

  // The form -------------------------------------------------------------------------------------------------------

  function field(name, label, control) {
    const lesson = index.lessons[name];
    const link = lesson ? el("a", { href: `lessons/${lesson}.html`, "aria-label": `lesson on ${words(name)}` }, "lesson") : "";
    control.id = `fit-${name}`;
    control.name = name;
    return el("div", { class: control.type === "checkbox" ? "switch" : "field" }, el("label", { for: control.id }, label), control, link);
  }
  function choose(name, label, choices, title = (choice) => choice) {
    return field(name, label, el("select", {}, ...choices.map((choice) => el("option", { value: choice }, title(choice)))));
  }
  function number(name) {
    const [label, min, max] = NUMBERS[name];
    return field(name, `${label}, ${min} to ${max.toLocaleString("en")}`, el("input", { type: "number", min, max, step: name === "epochs" ? "any" : 1, inputmode: "decimal" }));
  }
  function form() {
    const run = el("fieldset", {}, el("legend", {}, "The run"),
      choose("model", "Model", Object.keys(index.models), (name) => `${name} (${(index.models[name].weights / 1e9).toFixed(2)} billion)`),
      choose("card", "Card", Object.keys(index.cards), (name) => `${index.cards[name].name}, ${gib(index.cards[name].bytes)}`),
      ...Object.keys(NUMBERS).map(number));
    const tricks = el("fieldset", {}, el("legend", {}, "The tricks"), ...Object.entries(index.values).map(([name, values]) =>
      typeof values[0] === "boolean" ? field(name, words(name), el("input", { type: "checkbox" })) : choose(name, words(name), values)));
    const button = (text, tricksOf) => {
      const made = el("button", { type: "button", class: "md-button" }, text);
      made.addEventListener("click", () => go({ ...state, ...tricksOf() }));
      return made;
    };
    const buttons = el("p", { class: "buttons" }, button("All tricks off", () => index.defaults),
      button("The Kwanzaa recipe's tricks", () => index.cards[state.card].recipe),
      button("The same, to save memory", () => index.cards[state.card].capstone));
    const made = el("form", {}, run, tricks, buttons);
    made.addEventListener("submit", (event) => event.preventDefault());
    made.addEventListener("input", ({ target }) => {
      const { name } = target;
      if (NUMBERS[name] && (target.value === "" || !target.validity.valid)) return; // not there yet
      go({ ...state, [name]: target.type === "checkbox" ? target.checked : NUMBERS[name] ? Number(target.value) : target.value });
    });
    made.addEventListener("change", ({ target: { name, value } }) => { // a number is brought into its range
      if (NUMBERS[name]) go({ ...state, [name]: within(name, value, state[name]) });
    });
    return made;
  }
  function fill() {
    for (const [name, value] of Object.entries(state)) {
      const control = document.getElementById(`fit-${name}`);
      if (!control || (control === document.activeElement && control.type === "number" && Number(control.value) === value)) continue;
      if (control.type === "checkbox") control.checked = value;
      else control.value = value;
    }
  }

  // What is shown --------------------------------------------------------------------------------------------------

  const shown = {};
  function answer() {
    shown.verdict = el("p", { class: "verdict", role: "status", "aria-live": "polite" });
    shown.strange = el("p", { class: "strange", role: "alert" });
    shown.bar = el("div", { class: "stack" });
    shown.notes = el("ul", { class: "notes" });
    shown.legend = el("ul", { class: "legend" });
    shown.rows = el("tbody");
    shown.facts = el("ul", { class: "facts" });
    shown.command = el("code");
    shown.get = el("a", { download: "cria_train.ipynb", href: "#" }, "Download the notebook of this choice");
    shown.open = el("p");
    const table = el("table", { class: "bill" }, el("caption", {}, "The bill at the peak of a step"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "what"), el("th", { scope: "col" }, "bytes"), el("th", { scope: "col" }, ""))), shown.rows);
    return [el("div", { class: "head" }, shown.strange, shown.verdict, shown.bar),
      el("div", { class: "answer" }, shown.notes, shown.legend, shown.facts, el("div", { class: "wide" }, table),
        el("h2", { id: "the-command" }, "The command"), el("pre", {}, shown.command), shown.open)];
  }
  const groupOf = (name) => {
    const found = [...GROUPS.slice(5), ...GROUPS.slice(0, 5)].find(([, pattern]) => pattern.test(name));
    return GROUPS.indexOf(found);
  };
  function withExperts(row) { // of a mixture of experts most of "all others" are the experts
    const share = index.models[state.model].experts;
    if (row.name !== "weights: all others" || !share) return [row];
    const experts = Math.round(share * row.bytes);
    return [{ name: "weights: experts", bytes: experts }, { name: row.name, bytes: row.bytes - experts }];
  }
  function show(found) {
    root.classList.remove("failed");
    root.classList.toggle("refused", found.refused.length > 0);
    if (found.refused.length) {
      shown.verdict.replaceChildren(el("strong", {}, "Refused. "), found.refused.join("; also: "));
      root.dataset.found = JSON.stringify(found);
      return;
    }
    const all = [...found.rows.flatMap(withExperts), ...found.around].sort((one, other) => groupOf(one.name) - groupOf(other.name));
    const room = Math.max(found.needed, found.capacity) * 1.04;
    const groups = GROUPS.map(([name], number) => ({ name, number,
      bytes: all.filter((row) => groupOf(row.name) === number).reduce((sum, row) => sum + row.bytes, 0) })).filter(({ bytes }) => bytes);
    const left = found.capacity - found.needed;
    const words = found.tight
      ? `At least ${gib(found.least)} of ${gib(found.capacity)}, up to ${gib(found.needed)} with what PyTorch keeps.`
      : `${gib(found.needed)} of ${gib(found.capacity)}, ${gib(Math.abs(left))} ${left < 0 ? "too much" : "to spare"}.`;
    const verdict = found.tight ? "It is tight. " : found.fits ? "It fits. " : "It does not fit. ";
    const beyond = found.beyond ? " Rows are longer than the model's context." : ""; // in sight on a phone, too
    shown.verdict.replaceChildren(el("strong", { class: found.tight ? "tight" : found.fits ? "fits" : "not" }, verdict), words, beyond);
    const notes = [...(found.tight ? [index.says.tight] : []), ...found.doubts];
    shown.notes.replaceChildren(...notes.map((text) => el("li", {}, sentence(text))));
    const share = (bytes) => `${(100 * bytes) / room}%`;
    shown.bar.replaceChildren(...groups.map(({ name, number, bytes }) =>
      el("span", { class: `g${number}`, style: `width:${share(bytes)}`, title: `${name}: ${gib(bytes)}` })),
      el("span", { class: "margin", style: `left:${share((1 - index.margin) * found.capacity)};width:${share(index.margin * found.capacity)}` }),
      el("span", { class: "card-line", style: `left:${share(found.capacity)}` }));
    shown.bar.setAttribute("role", "img");
    shown.bar.setAttribute("aria-label", `${words} ${groups.map(({ name, bytes }) => `${name} ${gib(bytes)}`).join(", ")}`);
    shown.legend.replaceChildren(...groups.map(({ name, number, bytes }) =>
      el("li", {}, el("span", { class: `swatch g${number}` }), ` ${name} ${gib(bytes)}`)),
      el("li", {}, el("span", { class: "swatch card-line" }), ` the card ${gib(found.capacity)}`));
    shown.rows.replaceChildren(...all.map(({ name, bytes }) => el("tr", {}, el("th", { scope: "row" }, name),
      el("td", {}, bytes.toLocaleString("en")), el("td", {}, gib(bytes)))),
      el("tr", { class: "sum" }, el("th", { scope: "row" }, "needed"), el("td", {}, found.needed.toLocaleString("en")), el("td", {}, gib(found.needed))));
    const around = (middle) => between(middle / found.half, middle * found.half);
    const prices = found.prices.map(({ name, low, high }) => `${moneyBetween(low, high)} on ${name}`).join(", ");
    const run = found.fits ? `, the run ${around(60 * found.minutes)}${prices ? `: ${prices}` : ""}` : "";
    const times = found.seconds === null
      ? [el("li", {}, "How long a step takes is not predicted: we know no rates of this card.")]
      : [el("li", {}, `An optimizer step takes ${around(found.seconds)}${run}.`),
        el("li", {}, `Times are ${index.says.time}. Prices are those of Hugging Face Jobs' list of ${index.prices}.`)];
    shown.facts.replaceChildren(el("li", {}, `Most is alive at the moment "${found.moment}".`), ...times);
    const set = settings(state);
    shown.command.textContent = ["cria train kwanzaa", ...set].join(" \\\n  ");
    shown.get.href = `data:application/x-ipynb+json;charset=utf-8,${encodeURIComponent(notebook(state))}`;
    const direct = !set.length && state.card === "t4" && state.rows === index.run.rows;
    shown.open.replaceChildren(...(direct
      ? ["This is the Kwanzaa run: ", el("a", { href: index.notebook }, "open its notebook in Colab"), "."]
      : [shown.get, ...(COLAB[state.card]
        ? [", and open it in ", el("a", { href: "https://colab.research.google.com/" }, "Colab"), " (File, Upload notebook)."]
        : [". Colab has no such card."])]));
    root.dataset.found = JSON.stringify(found);
  }

  function fail(error, again) { // nothing of an earlier answer stays: it would be another model's
    if (!(error instanceof Missing)) throw error;
    const button = el("button", { type: "button", class: "md-button" }, "Try again");
    button.addEventListener("click", again);
    root.classList.remove("refused");
    root.classList.add("failed");
    delete root.dataset.found;
    delete root.dataset.state;
    const says = `The table "${error.message}" could not be loaded, so there is no answer. `;
    if (!shown.verdict) root.replaceChildren(shown.verdict = el("p", { class: "verdict", role: "status" }));
    shown.verdict.replaceChildren(el("strong", { class: "not" }, says), button);
  }

  async function go(next, { keep = true, strange = [] } = {}) {
    const mine = ++asked;
    let model;
    try {
      model = await (models[next.model] ??= get(next.model));
    } catch (error) {
      delete models[next.model]; // so that it is asked for again
      if (mine !== asked) return;
      state = next;
      fill();
      return fail(error, () => go(next, { keep, strange }));
    }
    if (mine !== asked) return; // a later click was faster
    const began = performance.now();
    state = next;
    if (keep) history.replaceState(null, "", `#${said(state)}`);
    fill();
    shown.strange.textContent = strange.join(" ");
    show(evaluate(state, model));
    root.getBoundingClientRect(); // laid out, too
    root.dataset.ms = (performance.now() - began).toFixed(2);
    root.dataset.state = said(state);
  }

  function follow() {
    const { found, strange } = read(location.hash.slice(1));
    return go(found, { keep: false, strange });
  }
  async function start() {
    try {
      index = await get("index");
    } catch (error) {
      return fail(error, start);
    }
    state = capstone();
    const [head, rest] = answer();
    root.replaceChildren(head, form(), rest);
    window.addEventListener("hashchange", follow);
    await follow();
  }
  start();
})();
