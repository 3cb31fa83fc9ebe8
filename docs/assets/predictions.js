// A reader's guess: kept in this browser alone, compared with what the lesson counted, and scored over the course.
// Without this script nothing is hidden, and the lessons read as they always did.
(() => {
  "use strict";
  const KEY = "cria-predictions";
  const FACTOR = 2; // from here on a guess is off by a factor, below it by per cent

  // {"the_bill-1": {guess, answer, shown}}: guess is null where the reader asked for the answer without one
  function read() {
    try {
      return JSON.parse(localStorage.getItem(KEY)) || {};
    } catch {
      return {}; // storage is switched off, or holds something else: begin anew
    }
  }

  function write(kept) {
    try {
      localStorage.setItem(KEY, JSON.stringify(kept));
    } catch {
      // Without storage a guess lives as long as its page.
    }
  }

  function number(value, unit) {
    const text = Math.abs(value) >= 100
      ? value.toLocaleString("en-US", { maximumFractionDigits: 0 })
      : String(Number(value.toPrecision(3)));
    return `${text} ${unit}`.trim();
  }

  // The same words as verdict() in cria_tricks/course/notebook.py; a test compares them.
  function verdict(guess, answer, unit) {
    if (typeof answer === "string") {
      if (guess === null) return `The answer: ${answer}.`;
      return guess === answer ? `You said ${guess}, which is right.` : `You said ${guess}, the answer is ${answer}.`;
    }
    if (guess === null) return `It is ${number(answer, unit)}.`;
    const said = `You said ${number(guess, unit)}, it is ${number(answer, unit)}`;
    const ratio = guess / answer;
    if (!(ratio > 0) || !Number.isFinite(ratio)) return `${said}.`;
    const way = Math.abs(guess) > Math.abs(answer) ? "too high" : "too low";
    const times = Math.max(ratio, 1 / ratio);
    if (times > FACTOR) {
      const digits = { minimumFractionDigits: 1, maximumFractionDigits: 1 };
      return `${said}: ${way} by a factor of ${times.toLocaleString("en-US", digits)}.`;
    }
    const off = Math.abs(ratio - 1);
    return off < 0.005 ? `${said}: right.` : `${said}: ${Math.round(100 * off)}% ${way}.`;
  }

  // "1,155", "1 155", "12,5" and "900 MiB" are numbers; "abc" is null.
  function parse(text, unit) {
    let written = text.trim();
    if (unit && written.toLowerCase().endsWith(unit.toLowerCase())) written = written.slice(0, -unit.length);
    written = written.replace(/[\s_]/g, "").replace(/,(?=\d{3}(\D|$))/g, "").replace(",", ".");
    return /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(written) ? Number(written) : null;
  }

  // 0: within a tenth, 1: within a factor of 2, 2: neither. A right choice is within a tenth.
  function distance({ guess, answer }) {
    if (typeof answer === "string") return guess === answer ? 0 : 2;
    if (guess === answer) return 0;
    const ratio = guess / answer;
    if (!(ratio > 0)) return 2;
    return Math.abs(ratio - 1) <= 0.1 ? 0 : Math.max(ratio, 1 / ratio) <= FACTOR ? 1 : 2;
  }

  function score(kept) {
    const taken = Object.values(kept).filter((one) => one.shown && one.guess !== null);
    const near = taken.filter((one) => distance(one) === 0).length;
    const within = taken.filter((one) => distance(one) <= 1).length;
    return `Your predictions in this course: ${taken.length} taken, ${near} within 10%, ${within} within a factor of 2.`;
  }

  function element(name, properties, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  class Prediction {
    constructor(place, changed) {
      Object.assign(this, { place, changed, key: place.dataset.key });
      // Not to be read at a glance; it is no secret.
      const bytes = Uint8Array.from(atob(place.dataset.of), (letter) => letter.charCodeAt(0));
      Object.assign(this, { choices: [], unit: "" }, JSON.parse(new TextDecoder().decode(bytes)));
      this.blocks = [...document.querySelectorAll(`.answer[data-of="${place.id}"]`)];
      this.build();
      this.cover();
      this.restore();
    }

    build() {
      const label = this.place.dataset.label;
      this.status = element("p", { className: "predict-says", id: `${this.place.id}-says` });
      this.status.setAttribute("role", "status"); // read aloud when it changes
      this.show = element("button", { type: "submit", textContent: "Show the answer", className: "md-button md-button--primary" });
      this.skip = element("button", { type: "button", textContent: "Show without guessing", className: "md-button" });
      this.skip.addEventListener("click", () => this.reveal(null));
      this.form = element("form", { noValidate: true, autocomplete: "off" });
      if (this.choices.length) {
        const radios = this.choices.map((choice) =>
          element("label", {}, element("input", { type: "radio", name: this.key, value: choice }), ` ${choice}`));
        this.fields = element("fieldset", {}, element("legend", { textContent: label }), ...radios);
      } else {
        this.input = element("input", { type: "text", inputMode: "decimal", id: `${this.place.id}-field`, size: 10 });
        this.input.setAttribute("aria-describedby", this.status.id);
        const named = element("label", { htmlFor: this.input.id, textContent: label });
        this.fields = element("fieldset", {}, named, " ", this.input, ` ${this.unit}`);
      }
      this.form.append(this.fields, element("p", { className: "predict-buttons" }, this.show, this.skip));
      this.form.addEventListener("submit", (event) => {
        event.preventDefault(); // nothing is sent
        this.answered();
      });
      this.form.addEventListener("input", () => this.keep());
      this.place.append(this.form, this.status);
      this.place.hidden = false;
    }

    // In the place of a far answer stands a line that leads back to the field.
    cover() {
      const first = this.blocks[0];
      if (!first || first.previousElementSibling === this.place) return;
      const button = element("button", { type: "button", textContent: "Show it", className: "md-button" });
      button.addEventListener("click", () => this.reveal(null));
      const link = element("a", { href: `#${this.place.id}`, textContent: "your guess" });
      this.stand = element("p", { className: "answer-hidden" }, "The answer to ", link, " is hidden here. ", button);
      first.before(this.stand);
    }

    written() {
      if (!this.choices.length) return this.input.value;
      return this.form.querySelector("input:checked")?.value ?? "";
    }

    keep() {
      const kept = read();
      if (!this.written()) delete kept[this.key];
      else kept[this.key] = { guess: this.written(), shown: false };
      write(kept);
    }

    answered() {
      const text = this.written();
      const guess = this.choices.length ? text || null : parse(text, this.unit);
      this.input?.setAttribute("aria-invalid", String(guess === null));
      if (guess !== null) return this.reveal(guess);
      const what = this.choices.length ? "Choose first" : text.trim() ? `"${text.trim()}" is no number: write one such as 12.5` : "Write a number first";
      this.status.textContent = `${what}, or show the answer without guessing.`;
      this.form.querySelector("input").focus();
    }

    reveal(guess) {
      write({ ...read(), [this.key]: { guess, answer: this.answer, shown: true } });
      const within = this.form.contains(document.activeElement) || this.stand?.contains(document.activeElement);
      this.open(guess);
      if (within) this.status.focus(); // the button that had the focus is gone
      this.changed();
    }

    open(guess) {
      this.fields.disabled = true; // the first guess counts
      this.setHidden(false);
      this.status.tabIndex = -1;
      this.status.textContent = verdict(guess, this.answer, this.unit);
    }

    setHidden(hidden) {
      for (const block of this.blocks) block.hidden = hidden;
      if (this.stand) this.stand.hidden = !hidden;
      this.show.parentElement.hidden = !hidden;
    }

    // As it was left: untouched, with a guess, or revealed.
    restore() {
      const kept = read()[this.key];
      const guess = kept?.guess ?? "";
      this.fields.disabled = false;
      this.status.textContent = "";
      this.input?.removeAttribute("aria-invalid");
      if (this.input) this.input.value = guess;
      for (const radio of this.form.querySelectorAll("[type=radio]")) radio.checked = radio.value === guess;
      this.setHidden(true);
      if (kept?.shown) this.open(kept.guess);
    }
  }

  function start() {
    const places = [...document.querySelectorAll(".predict[data-of]")];
    if (!places.length) return;
    const says = element("p", {});
    says.setAttribute("role", "status");
    const reset = element("button", { type: "button", textContent: "Reset", className: "md-button" });
    const changed = () => {
      says.textContent = score(read());
    };
    const all = places.map((place) => new Prediction(place, changed));
    reset.addEventListener("click", () => {
      write({});
      for (const one of all) one.restore();
      changed();
    });
    const where = element("small", { textContent: "Kept in this browser only." });
    const home = element("aside", { className: "predict-score" }, says, reset, where);
    home.setAttribute("aria-label", "Your predictions");
    places[0].closest("article, main, body").append(home);
    changed();
  }

  window.criaPredictions = { verdict, parse }; // for the tests
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
