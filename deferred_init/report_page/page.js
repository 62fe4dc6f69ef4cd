"use strict";
const report = JSON.parse(document.getElementById("report").textContent);
const steps = report.steps;
const MAX_ROWS = 500, MAX_CELLS = 80;
const byId = (id) => document.getElementById(id);
const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);

function make(tag, text, attributes) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  return node;
}

function bytesText(count) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return (count / size).toFixed(2) + " " + unit;
  }
  return count + " bytes";
}

const secondsText = (s) => (s >= 1 ? s.toFixed(2) + " s" : (s * 1e3).toFixed(2) + " ms");
const nameOf = (step) => step.fqn || "(root)";

function show(id) { byId(id + "-section").hidden = false; }

function header() {
  const errors = report.findings.filter((finding) => finding.severity === "error").length;
  const kind = report.device === null ? "Audit" : "Materialized";
  const verdict = byId("verdict");
  verdict.textContent = kind + ": " +
    (report.ok ? "ready" : "not ready, " + errors + (errors === 1 ? " error" : " errors"));
  verdict.className = report.ok ? "good" : "bad";
  const figures = [];
  if (report.device !== null) {
    figures.push(["device", report.device],
      ["tensors", sum(steps, (step) => step.num_tensors).toLocaleString("en")],
      ["bytes", bytesText(report.final_bytes)]);
  }
  if (report.peak_bytes !== null) figures.push(["peak", bytesText(report.peak_bytes)]);
  else if (report.predicted_peak_bytes !== null)
    figures.push(["predicted peak", bytesText(report.predicted_peak_bytes)]);
  if (report.recipe !== null) figures.push(["recipe", report.recipe]);
  if (report.rng !== null) figures.push(["rng", report.rng]);
  for (const [stage, value] of Object.entries(report.seconds))
    figures.push([stage, secondsText(value)]);
  for (const [term, value] of figures) {
    const group = make("div");
    group.append(make("dt", term), make("dd", value));
    byId("figures").append(group);
  }
  byId("versions").textContent =
    Object.entries(report.versions).map((pair) => pair.join(" ")).join(", ");
}

function findings() {
  if (!report.findings.length) return;
  show("findings");
  const rank = (finding) => (finding.severity === "error" ? 0 : 1);
  for (const finding of [...report.findings].sort((a, b) => rank(a) - rank(b))) {
    const item = make("li", undefined, { class: finding.severity });
    item.append(make("code", finding.fqn || "(root)"), " ", make("code", finding.code),
      make("br"), finding.message);
    byId("findings").append(item);
  }
}

function curve() {
  const total = sum(steps, (step) => step.seconds), most = sum(steps, (step) => step.num_bytes);
  if (!total || !most) return;
  show("memory");
  let time = 0, made = 0;
  const points = [[0, 0]];
  for (const step of steps) {
    time += step.seconds; made += step.num_bytes;
    points.push([time, made]);
  }
  const draw = () => byId("curve").replaceChildren(curveOf(points, total, most));
  draw();
  addEventListener("resize", draw);
  byId("curve-hint").textContent = "From the steps: final bytes of each, when the host had finished it. " +
    "Scratch is not in the curve; the peak is above.";
}

// Drawn in the pixels of its place, so that the text has one size on every screen.
function curveOf(points, total, most) {
  const width = byId("curve").clientWidth, height = 220, left = 70, bottom = 24, top = 10;
  const x = (t) => left + (width - left - 10) * t / total;
  const y = (b) => height - bottom - (height - bottom - top) * b / most;
  const path = points.map(([t, b], i) => (i ? "L" : "M") + x(t).toFixed(1) + " " + y(b).toFixed(1)).join("");
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const add = (tag, attributes, text) => {
    const node = document.createElementNS(svg.namespaceURI, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    svg.append(node);
  };
  svg.setAttribute("viewBox", "0 0 " + width + " " + height);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "Bytes made over time, up to " + bytesText(most));
  for (const part of [0, 0.5, 1]) {
    add("line", { class: "axis", x1: left, x2: width - 10, y1: y(most * part), y2: y(most * part) });
    add("text", { x: left - 8, y: y(most * part) + 4, "text-anchor": "end" }, bytesText(Math.round(most * part)));
    add("text", { x: x(total * part), y: height - 6, "text-anchor": ["start", "middle", "end"][part * 2] }, secondsText(total * part));
  }
  add("path", { class: "area", d: path + "L" + x(total) + " " + y(0) + "L" + left + " " + y(0) + "Z" });
  add("path", { class: "line", d: path });
  return svg;
}

function groups() {
  const patterns = steps.map((step) => nameOf(step).replace(/(^|\.)\d+(?=\.|$)/g, "$1*"));
  const deepest = Math.max(...patterns.map((name) => name.split(".").length));
  for (let depth = deepest; depth > 0; depth--) {
    const found = new Map();
    steps.forEach((step, index) => {
      const name = patterns[index].split(".").slice(0, depth).join(".");
      const formats = Object.entries(step.bytes_by_format);
      for (const [format, size] of formats.length ? formats : [["bytes", step.num_bytes]]) {
        const key = name + "\n" + format;
        const group = found.get(key) || { name, format, size: 0 };
        group.size += size;
        found.set(key, group);
      }
    });
    const list = [...found.values()].filter((group) => group.size > 0).sort((a, b) => b.size - a.size);
    if (list.length <= MAX_CELLS || depth === 1) return list.slice(0, MAX_CELLS);
  }
  return [];
}

// Squarified: a row takes cells as long as its worst aspect ratio gets better.
function squarify(cells, x, y, width, height, place) {
  const scale = width * height / sum(cells, (cell) => cell.size);
  let start = 0;
  const worst = (row, side) => {
    const area = sum(row, (cell) => cell.size * scale), length = area / side;
    return Math.max(...row.map((cell) => {
      const other = cell.size * scale / length;
      return Math.max(length / other, other / length);
    }));
  };
  while (start < cells.length) {
    const side = Math.min(width, height);
    let end = start + 1;
    while (end < cells.length &&
      worst(cells.slice(start, end + 1), side) <= worst(cells.slice(start, end), side)) end++;
    const row = cells.slice(start, end);
    const length = sum(row, (cell) => cell.size * scale) / side;
    let offset = 0;
    for (const cell of row) {
      const other = cell.size * scale / length;
      if (width >= height) place(cell, x, y + offset, length, other);
      else place(cell, x + offset, y, other, length);
      offset += other;
    }
    if (width >= height) { x += length; width -= length; } else { y += length; height -= length; }
    start = end;
  }
}

function map() {
  const cells = steps.length ? groups() : [];
  if (!cells.length) return;
  show("map");
  const totals = new Map();
  for (const cell of cells) totals.set(cell.format, (totals.get(cell.format) || 0) + cell.size);
  const formats = [...totals.keys()].sort((a, b) => totals.get(b) - totals.get(a));
  const color = (format) => "var(--c" + Math.min(formats.indexOf(format), 5) + ")";
  for (const format of formats) {
    const item = make("li"), mark = make("i");
    mark.style.background = color(format);
    item.append(mark, format + ": " + bytesText(totals.get(format)));
    byId("legend").append(item);
  }
  const box = byId("map");
  const draw = () => {
    box.replaceChildren();
    squarify(cells, 0, 0, box.clientWidth, box.clientHeight, (cell, x, y, width, height) => {
      const node = make("div", undefined, { title: cell.name + "\n" + cell.format + "\n" + bytesText(cell.size) });
      if (width > 60 && height > 26) node.textContent = cell.name + " " + bytesText(cell.size);
      Object.assign(node.style, { left: x + "px", top: y + "px", width: width + "px",
        height: height + "px", background: color(cell.format), padding: width < 12 ? "0" : "" });
      box.append(node);
    });
  };
  draw();
  addEventListener("resize", draw);
}

function slowest() {
  const list = [...steps].filter((step) => step.seconds > 0)
    .sort((a, b) => b.seconds - a.seconds).slice(0, 10);
  if (!list.length) return;
  show("slow");
  for (const step of list) {
    const item = make("li"), bar = make("b");
    bar.style.width = Math.max(0.5, 100 * step.seconds / list[0].seconds) + "%";
    item.append(make("code", nameOf(step)), make("span", secondsText(step.seconds)), bar);
    byId("slowest").append(item);
  }
}

const COLUMNS = [
  ["module", nameOf],
  ["bytes", (step) => step.num_bytes, (n) => n.toLocaleString("en")],
  ["ms", (step) => step.seconds, (s) => (s * 1e3).toFixed(2)],
  ["tensors", (step) => step.num_tensors, (n) => n.toLocaleString("en")],
  ["format", (step) => Object.keys(step.bytes_by_format).join(", ")],
  ["class", (step) => step.module_class],
  ["values from", (step) => step.source || step.initializer],
];

function table() {
  if (!steps.length) return;
  show("steps");
  const head = byId("steps").tHead.rows[0], body = byId("steps").tBodies[0];
  let sorted = null, down = false;
  const collator = new Intl.Collator("en", { numeric: true });
  const draw = () => {
    const wanted = byId("filter").value.toLowerCase();
    const rows = steps.filter((step) => nameOf(step).toLowerCase().includes(wanted));
    if (sorted !== null) {
      const of = COLUMNS[sorted][1];
      rows.sort((a, b) => {
        const [one, other] = [of(a), of(b)];
        const order = typeof one === "number" ? one - other : collator.compare(one, other);
        return down ? -order : order;
      });
    }
    body.replaceChildren(...rows.slice(0, MAX_ROWS).map((step) => {
      const row = make("tr");
      for (const [, of, text] of COLUMNS)
        row.append(make("td", text ? text(of(step)) : of(step), text ? { class: "number" } : {}));
      return row;
    }));
    byId("count").textContent = rows.length.toLocaleString("en") + " of " +
      steps.length.toLocaleString("en") + (rows.length > MAX_ROWS ? ", the first " + MAX_ROWS + " shown" : "");
  };
  COLUMNS.forEach(([title, , text], index) => {
    const cell = make("th", undefined, { scope: "col", ...(text ? { class: "number" } : {}) });
    const button = make("button", title, { type: "button" });
    button.addEventListener("click", () => {
      down = sorted === index ? !down : Boolean(text);
      sorted = index;
      for (const other of head.cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      draw();
    });
    cell.append(button);
    head.append(cell);
  });
  byId("filter").addEventListener("input", draw);
  draw();
}

function remarks() {
  const section = byId("remarks");
  for (const [title, items] of [["Rebound to a new object", report.rebound],
    ["Assumed", report.assumptions], ["Notes", report.notes]]) {
    if (!items.length) continue;
    const list = make("ul");
    list.append(...items.map((text) => make("li", text)));
    section.append(make("h2", title), list);
  }
  section.hidden = !section.children.length;
}

header(); findings(); curve(); map(); slowest(); table(); remarks();
