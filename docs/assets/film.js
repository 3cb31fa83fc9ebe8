// A training step as a film. report/film_answer.py writes the moments that a dry run has seen, and this draws them: no number
// is computed here but sums. Without JavaScript the page shows a still picture, which this replaces.
(function () {
  const GIB = 2 ** 30;
  // The lines of the bill, in the order in which they are stacked; their colours are in film.css.
  const LINES = ["weights", "optimizer states", "batch", "gradients", "saved activations", "temporary activations", "logits", "workspace"];
  const GRADIENTS = LINES.indexOf("gradients");
  const SECONDS = 14; // of playing, from the first moment to the last
  const MORPH = 700; // milliseconds in which one film becomes another
  const SMALL = 2 ** 20; // a line that is smaller at every moment is not in the legend
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");
  let ids = 0;

  // Films come as a script, because a page that was opened as a file may not fetch. The page of cria film has them inside.
  const load = (address) => new Promise((done, failed) => {
    const made = document.createElement("script");
    made.src = address;
    made.onload = done;
    made.onerror = failed;
    document.head.append(made);
  });
  function el(tag, attributes = {}, ...inside) {
    const svg = ["svg", "path", "line", "text", "rect", "circle", "g", "defs", "pattern"].includes(tag);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    made.append(...inside);
    return made;
  }
  function size(bytes) {
    if (bytes < 1024) return `${bytes} B`;
    for (const [unit, one] of [["KiB", 2 ** 10], ["MiB", 2 ** 20]]) {
      if (bytes < 1024 * one) return `${(bytes / one).toFixed(1)} ${unit}`;
    }
    return `${(bytes / GIB).toFixed(1)} GiB`;
  }

  // Reading ---------------------------------------------------------------------------------------------------------------

  function opened(data) {
    const film = { ...data, count: data.x.length };
    film.bytes = LINES.map((line) => data.lines[line]);
    film.tops = []; // the upper edge of each line in the stack
    film.bytes.forEach((values, n) => film.tops.push(values.map((value, place) => value + (n ? film.tops[n - 1][place] : 0))));
    film.total = film.tops[LINES.length - 1];
    film.kept = data.reserved || film.total;
    return film;
  }
  const partAt = (film, moment) => film.parts.find(([, , last]) => moment <= last);

  // The largest tensors of a moment; equal tensors of several blocks are one entry.
  const largest = (film, moment) => film.largest[moment].map(([number, count]) => {
    const [line, bytes, shape, dtype, module, how] = film.tensors[number];
    return { line, bytes, shape, dtype, module, how, count };
  });

  // One element ---------------------------------------------------------------------------------------------------------

  async function start(root) {
    if (!window.criaFilms) await load(`${root.dataset.base}/home.js`);
    const set = window.criaFilms, names = Object.keys(set.films), id = `film-${(ids += 1)}`;
    let film = opened(set.films[names[0]]), view = film, moment = film.peak, playing = 0, said = 0, morphing = 0, size_ = {};

    // The parts of the element.
    const chart = el("svg", { role: "img", "aria-labelledby": `${id}-now` });
    const scrubber = el("input", { type: "range", min: 0, step: 1, "aria-label": "Moment of the step" });
    const play = el("button", { type: "button", class: "film-play" }, "Play");
    const toPeak = el("button", { type: "button" }, "To the peak");
    const now = el("p", { class: "film-now", id: `${id}-now` });
    const change = el("p", { class: "film-change" });
    change.hidden = names.length < 2;
    const legend = el("ul", { class: "film-legend" });
    const head = el("p", { class: "film-head" }, "The largest tensors at this moment");
    const list = el("ol", { class: "film-largest" });
    const live = el("p", { class: "film-live", "aria-live": "polite" });
    const switches = controls();
    root.replaceChildren(
      el("p", { class: "film-title" }, set.title), switches, chart, scrubber,
      el("div", { class: "film-buttons" }, play, toPeak), now, change, legend, head, list, live,
    );
    root.classList.add("film-ready");

    function controls() {
      const box = el("fieldset", { class: "film-switches" }, el("legend", {}, "Switches"));
      if (names.length < 2) { box.hidden = true; return box; }
      box.append(el("p", { class: "film-adds" }, "Each step adds a switch to those before it."));
      names.forEach((one, n) => {
        const input = el("input", { type: "radio", name: id, id: `${id}-${n}` });
        input.checked = n === 0;
        input.addEventListener("change", () => show(one));
        box.append(el("label", { for: `${id}-${n}` }, input, (n ? `${n}. + ` : "") + one));
      });
      return box;
    }

    // Drawing. The view is a film, or a mixture of two while one becomes the other.
    function layout() {
      const width = Math.max(280, root.clientWidth), height = width < 520 ? 300 : 360;
      size_ = { width, height, left: 46, right: width - 8, top: 14, bottom: height - 34 };
      chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
      chart.style.height = `${height}px`;
      scrubber.style.marginLeft = `${size_.left - 8}px`;
      scrubber.style.width = `${size_.right - size_.left + 16}px`;
      draw();
    }
    const at = (x) => size_.left + ((size_.right - size_.left) * x) / 10000;
    const up = (bytes) => size_.bottom - ((size_.bottom - size_.top) * bytes) / set.top;
    function edge(xs, values) {
      let path = "";
      for (let n = 0; n < xs.length; n += 1) path += `${n ? "L" : "M"}${at(xs[n]).toFixed(1)} ${up(values[n]).toFixed(1)}`;
      return path;
    }
    const below = (xs, values) => `${edge(xs, values)}L${at(xs[xs.length - 1]).toFixed(1)} ${size_.bottom}L${at(xs[0]).toFixed(1)} ${size_.bottom}Z`;
    function draw() {
      const { width, height, left, right, top, bottom } = size_, inside = [];
      const text = (words, x, y, more = {}) => el("text", { x, y, ...more }, words);
      const hatch = el("pattern", { id: `${id}-hatch`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        el("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "film-hatch" }));
      inside.push(el("defs", {}, hatch));
      const step = [1, 2, 5, 10, 20, 50].find((gib) => set.top / GIB / gib <= 6) || 100;
      for (let gib = 0; gib * GIB <= set.top; gib += step) {
        inside.push(el("line", { class: "film-grid", x1: left, x2: right, y1: up(gib * GIB), y2: up(gib * GIB) }));
        inside.push(text(gib ? `${gib} GiB` : "0", left - 4, up(gib * GIB) + 4, { "text-anchor": "end" }));
      }
      if (film.reserved) inside.push(el("path", { d: below(view.x, view.kept), fill: `url(#${id}-hatch)` }));
      for (let n = LINES.length - 1; n >= 0; n -= 1) { // from the top of the stack, so that each area hides what it does not add
        inside.push(el("path", { d: below(view.x, view.tops[n]), class: `film-area film-line-${n}` }));
      }
      if (film.reserved) inside.push(el("path", { d: edge(view.x, view.kept), class: "film-reserved" }));
      film.parts.forEach(([name, first, last], n) => {
        const from = n ? at(film.x[first]) : left, to = at(film.x[last]);
        if (n) inside.push(el("line", { class: "film-part", x1: from, x2: from, y1: top, y2: bottom + 6 }));
        const words = to - from < 84 ? name.replace("optimizer step", "step") : name;
        inside.push(text(words, (from + to) / 2, bottom + 17, { "text-anchor": "middle" }));
      });
      const line = up(film.capacity), within = film.capacity <= set.top; // else the films stay far below it
      if (within) inside.push(el("line", { class: "film-card", x1: left, x2: right, y1: line, y2: line }));
      const peak = highest(view), x = at(view.x[peak]), side = x > (left + right) / 2; // the card's name on the other side
      inside.push(text(`${within ? "" : "↑ "}${film.card}: ${size(film.capacity)}`, side ? left + 4 : right - 2, within ? line - 5 : top + 2,
        { class: "film-card-name", "text-anchor": side ? "start" : "end" }));
      inside.push(el("line", { class: "film-marker", y1: top, y2: bottom }), el("circle", { class: "film-dot", r: 4.5 }));
      inside.push(el("circle", { class: "film-peak", r: 3.5, cx: x, cy: up(view.total[peak]) }));
      inside.push(text(`peak ${size(view.total[peak])}`, x + (side ? -8 : 8), Math.max(up(view.total[peak]) - 6, 11),
        { class: "film-peak-name", "text-anchor": side ? "end" : "start" }));
      chart.replaceChildren(...inside);
      chart.dataset.peak = Math.round(view.total[peak]);
      mark();
    }
    const highest = (one) => one.total.reduce((best, value, n) => (value > one.total[best] ? n : best), 0);
    function mark() {
      const x = at(film.x[moment]), line = chart.querySelector(".film-marker"), dot = chart.querySelector(".film-dot");
      line.setAttribute("x1", x); line.setAttribute("x2", x);
      dot.setAttribute("cx", x); dot.setAttribute("cy", up(film.total[moment]));
      dot.style.visibility = morphing ? "hidden" : "visible";
    }

    // What is said of a moment.
    function say() {
      const [part] = partAt(film, moment), total = film.total[moment];
      scrubber.max = film.count - 1;
      scrubber.value = moment;
      const begins = part === "backward pass" && !film.bytes[GRADIENTS][moment] ? "start of the backward pass" : part;
      const words = `${begins[0].toUpperCase()}${begins.slice(1)}: ${size(total)} in tensors`
        + (film.reserved ? `, ${size(film.kept[moment])} reserved` : "") + (moment === film.peak ? ". This is the peak." : "");
      scrubber.setAttribute("aria-valuetext", words);
      now.textContent = words;
      legend.replaceChildren(...LINES.map((line, n) => [line, n]).filter(([, n]) => film.bytes[n].some((bytes) => bytes >= SMALL)).map(([line, n]) =>
        el("li", {}, el("span", { class: `film-swatch film-line-${n}` }), `${line} `, el("span", { class: "film-bytes" }, size(film.bytes[n][moment])))));
      if (film.reserved) {
        legend.append(el("li", {}, el("span", { class: "film-swatch film-swatch-reserved" }), "reserved, not used ", el("span", { class: "film-bytes" }, size(Math.max(0, film.kept[moment] - total)))));
      }
      const there = largest(film, moment);
      list.replaceChildren(...there.map((one) => el("li", {},
        el("span", { class: `film-swatch film-line-${LINES.indexOf(one.line)}` }),
        el("strong", {}, size(one.count * one.bytes)), " ",
        el("code", {}, one.module), one.module.endsWith(`.${one.how}`) ? "" : ` ${one.how}`,
        el("small", {}, `${one.count > 1 ? `${one.count} × ${size(one.bytes)}: ` : ""}${one.shape.map((n) => n.toLocaleString("en")).join(" × ") || "one number"}, ${one.dtype}, ${one.line}`))));
      root.dataset.moment = moment;
      clearTimeout(said); // a reader hears a moment when the marker rests, not each on its way
      if (!playing) said = setTimeout(() => { live.textContent = `${words} Largest: ${there[0].module}, ${size(there[0].count * there[0].bytes)}.`; }, 900);
    }
    function go(to) {
      moment = Math.max(0, Math.min(film.count - 1, to));
      mark();
      say();
    }
    function nearest(x) { // the kept moment at a place of the axis
      let low = 0, high = film.count - 1;
      while (low < high) { const middle = (low + high) >> 1; if (film.x[middle] < x) low = middle + 1; else high = middle; }
      return low && x - film.x[low - 1] < film.x[low] - x ? low - 1 : low;
    }

    // Playing.
    function pause() {
      cancelAnimationFrame(playing);
      playing = 0;
      play.textContent = "Play";
      say();
    }
    function run() {
      const from = moment >= film.count - 1 ? 0 : film.x[moment], began = performance.now();
      play.textContent = "Pause";
      const frame = (time) => {
        const x = from + ((time - began) * 10000) / (1000 * SECONDS);
        go(nearest(Math.min(x, 10000)));
        if (x >= 10000) pause();
        else playing = requestAnimationFrame(frame);
      };
      playing = requestAnimationFrame(frame);
    }

    // Another film of the set.
    function show(other) {
      if (playing) pause();
      const before = film, old = view;
      film = opened(set.films[other]);
      moment = film.peak;
      const less = before.total[before.peak] - film.total[film.peak];
      change.textContent = `The peak was ${size(before.total[before.peak])} and is ${size(film.total[film.peak])}: `
        + (less ? `${size(Math.abs(less))} ${less > 0 ? "less" : "more"}.` : "the same.");
      root.dataset.film = other;
      say();
      morph(old, film);
    }
    function mixed(one, xs, values) { // the values of a film at the places of another
      let place = 0;
      return xs.map((x) => {
        while (place < one.x.length - 2 && one.x[place + 1] < x) place += 1;
        const width = one.x[place + 1] - one.x[place], share = width ? Math.min(1, (x - one.x[place]) / width) : 1;
        return values[place] + (values[place + 1] - values[place]) * share;
      });
    }
    function morph(from, to) {
      cancelAnimationFrame(morphing);
      if (still.matches) { morphing = 0; view = to; draw(); return; }
      const xs = Float64Array.from([...from.x, ...to.x]).sort();
      const pairs = (values) => [mixed(from, xs, values(from)), mixed(to, xs, values(to))];
      const tops = LINES.map((_, n) => pairs((one) => one.tops[n])), kept = pairs((one) => one.kept), began = performance.now();
      const frame = (time) => {
        const done = Math.min(1, Math.max(0, time - began) / MORPH), share = done * done * (3 - 2 * done);
        const mix = ([a, b]) => a.map((value, n) => value + (b[n] - value) * share);
        view = done < 1 ? { x: xs, tops: tops.map(mix), kept: mix(kept) } : to;
        if (done < 1) view.total = view.tops[LINES.length - 1];
        morphing = done < 1 ? requestAnimationFrame(frame) : 0;
        draw();
      };
      morphing = requestAnimationFrame(frame);
    }

    scrubber.addEventListener("input", () => { if (playing) pause(); go(Number(scrubber.value)); });
    play.addEventListener("click", () => (playing ? pause() : run()));
    toPeak.addEventListener("click", () => { if (playing) pause(); go(film.peak); });
    const point = (event) => {
      if (playing || morphing) return;
      const box = chart.getBoundingClientRect();
      go(nearest((((event.clientX - box.left) * size_.width) / box.width - size_.left) / (size_.right - size_.left) * 10000));
    };
    chart.addEventListener("pointermove", point);
    chart.addEventListener("pointerdown", (event) => { if (playing) pause(); point(event); });
    root.dataset.film = names[0];
    layout();
    say();
    new ResizeObserver(() => { if (Math.max(280, root.clientWidth) !== size_.width) layout(); }).observe(root);
  }

  // What is far below is loaded when one comes near.
  const near = new IntersectionObserver((seen) => seen.filter((one) => one.isIntersecting).forEach(({ target }) => {
    near.unobserve(target);
    start(target).catch(() => {}); // the still picture stays
  }), { rootMargin: "600px" });
  const begin = () => document.querySelectorAll(".film").forEach((root) => near.observe(root));
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
