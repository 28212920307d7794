// The page of the mixing desk, the interactive parts of the report, and a notebook widget. One ES module without
// dependencies: `startDesk` for the server's page, `enhanceReport` for reports, the default export for anywidget.

const SLOTS = ["A", "B"];
const LIMIT = 100; // coefficients beyond this are refused by the server
const SLOW = 300; // milliseconds until the page says that it computes
const MERGE = 800; // milliseconds in which steps of one slider are one step of undo

// ------------------------------------------------------------------------------------------------ small helpers

export function element(tag, attributes = {}, ...children) {
  const out = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") out.className = value;
    else if (name.startsWith("on")) out.addEventListener(name.slice(2), value);
    else if (name in out && typeof value !== "string") out[name] = value;
    else out.setAttribute(name, value);
  }
  out.append(...children);
  return out;
}

const css = (name, place) => getComputedStyle(place).getPropertyValue(name).trim();
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const rounded = (x) => Math.round(x * 1e6) / 1e6;
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

export function shownNumber(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "none";
  const text = Math.abs(x) >= 0.0005 || x === 0 ? x.toFixed(3).replace(/\.?0+$/, "") : x.toExponential(1);
  return text.replace("-", "\u2212");
}

// ------------------------------------------------------------------------------------------------ coefficients

export function mean(values, cells) {
  let sum = 0;
  for (const [row, column] of cells) sum += values[row][column];
  return cells.length ? sum / cells.length : 0;
}

// Move the mean of some cells: all by the same difference, by the same factor, or to the same number.
export function moved(values, cells, target, mode) {
  const before = mean(values, cells);
  const factor = target / before;
  const scales = mode === "scale" && Math.abs(before) > 1e-9;
  const out = values.slice();
  const copied = new Set();
  for (const [row, column] of cells) {
    if (!copied.has(row)) {
      copied.add(row);
      out[row] = out[row].slice();
    }
    const own = values[row][column];
    const next = mode === "set" ? target : scales ? own * factor : own + target - before;
    out[row][column] = clamp(rounded(next), -LIMIT, LIMIT);
  }
  return out;
}

export class History {
  constructor(values) {
    this.values = values;
    this.past = [];
    this.future = [];
    this.last = { what: null, time: 0 };
  }

  // `what` names the control: its steps in quick succession are undone together.
  push(values, what = null, time = Date.now()) {
    const merges = what !== null && this.last.what === what && time - this.last.time < MERGE && this.past.length > 0;
    if (!merges) this.past.push(this.values);
    if (this.past.length > 500) this.past.shift();
    this.values = values;
    this.future = [];
    this.last = { what, time };
  }

  undo() {
    if (!this.past.length) return false;
    this.future.push(this.values);
    this.values = this.past.pop();
    this.last = { what: null, time: 0 };
    return true;
  }

  redo() {
    if (!this.future.length) return false;
    this.past.push(this.values);
    this.values = this.future.pop();
    this.last = { what: null, time: 0 };
    return true;
  }
}

// ------------------------------------------------------------------------------------------------ heat map

function parsed(colour) {
  const hex = colour.replace("#", "");
  return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function mixed(from, to, share) {
  return `rgb(${from.map((x, i) => Math.round(x + (to[i] - x) * share)).join(",")})`;
}

class Colours {
  constructor(place) {
    this.cool = parsed(css("--cool", place));
    this.warm = parsed(css("--warm", place));
    this.zero = parsed(css("--zero", place));
    this.none = css("--none", place);
    this.ink = css("--ink", place);
    this.faint = css("--faint", place);
    this.focus = css("--focus", place);
  }

  of(value, limit) {
    if (value === null || Number.isNaN(value)) return "transparent"; // no such cell
    const share = Math.pow(clamp(Math.abs(value) / limit, 0, 1), 0.8);
    return mixed(this.zero, value < 0 ? this.warm : this.cool, share);
  }
}

function niceLimit(values) {
  let most = 0;
  for (const row of values) for (const x of row) if (x !== null) most = Math.max(most, Math.abs(x));
  if (most < 1e-6) return 1;
  const unit = Math.pow(10, Math.floor(Math.log10(most)));
  return [1, 2, 5, 10].map((m) => m * unit).find((x) => x >= most * 0.999);
}

// A map of rows by columns. Columns are {label, depth, kind}; strips are rows of bars below, {name, values, ends}.
export class HeatMap {
  constructor(root, { rows, columns, values, label, strips = [], selectable = false, limit = null, rowHeight = 18 }) {
    Object.assign(this, { root, rows, columns, values, strips, selectable, rowHeight });
    this.fixedLimit = limit;
    this.cursor = null;
    this.selection = null; // [row, row, column, column], both ends included
    this.onSelect = () => {};
    this.header = columns.some((c) => c.depth !== null && c.depth !== undefined) ? 20 : 4;
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.names = element("div", { class: "names", "aria-hidden": "true" });
    const keys = selectable ? " Arrow keys move, with Shift they select, plus and minus change the selected cells." : "";
    this.field = element("div", {
      class: "field", tabindex: "0", role: "application",
      "aria-label": `${label}: ${rows.length} rows by ${columns.length} columns.${keys}`,
    }, this.canvas);
    this.reading = element("div", { class: "reading", role: "status", "aria-live": "polite" });
    this.scale = element("span", { class: "scale" });
    root.classList.add("map");
    root.replaceChildren(this.names, this.field, this.reading);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  update(values, strips = this.strips) {
    this.values = values;
    this.strips = strips;
    this.draw();
    if (this.cursor) this.read(...this.cursor);
  }

  draw() {
    const room = this.field.clientWidth;
    if (!room) return;
    const colours = new Colours(this.root);
    this.limit = this.fixedLimit || niceLimit(this.values);
    const ratio = window.devicePixelRatio || 1;
    this.width = clamp(room / this.columns.length, 4, 28);
    const stripHeight = 34;
    const height = this.header + this.rows.length * this.rowHeight + this.strips.length * (stripHeight + 8) + 2;
    const full = Math.max(1, this.width * this.columns.length);
    this.canvas.width = Math.round(full * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${full}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    this.drawHeader(pen, colours);
    const gap = this.width >= 8 ? 1 : 0;
    for (let r = 0; r < this.rows.length; r++) {
      const top = this.header + r * this.rowHeight;
      for (let c = 0; c < this.columns.length; c++) {
        pen.fillStyle = colours.of(this.values[r][c], this.limit);
        pen.fillRect(this.edge(c), top, this.edge(c + 1) - this.edge(c) - gap, this.rowHeight - 1);
      }
    }
    this.drawLayers(pen, colours);
    this.strips.forEach((strip, i) => {
      const top = this.header + this.rows.length * this.rowHeight + 8 + i * (stripHeight + 8);
      this.drawStrip(pen, colours, strip, top, stripHeight);
    });
    this.drawMarks(pen, colours);
    this.drawNames(stripHeight);
    this.drawScale(colours);
  }

  // Columns begin at whole pixels, so that cells have sharp edges.
  edge(column) {
    const ratio = window.devicePixelRatio || 1;
    return Math.round(column * this.width * ratio) / ratio;
  }

  drawHeader(pen, colours) {
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = colours.faint;
    pen.textAlign = "center";
    let reach = -Infinity;
    for (const { depth, from, to } of this.groups()) {
      if (depth === null) continue;
      const middle = ((from + to) / 2) * this.width;
      const text = String(depth);
      const half = pen.measureText(text).width / 2 + 3;
      if (middle - half < reach) continue;
      pen.fillText(text, middle, 13);
      reach = middle + half;
    }
  }

  groups() {
    const out = [];
    this.columns.forEach((column, c) => {
      const depth = column.depth ?? null;
      const last = out[out.length - 1];
      if (last && last.depth === depth) last.to = c + 1;
      else out.push({ depth, from: c, to: c + 1 });
    });
    return out;
  }

  drawLayers(pen, colours) {
    pen.fillStyle = colours.faint;
    pen.globalAlpha = 0.55;
    for (const { from } of this.groups().slice(1)) {
      pen.fillRect(this.edge(from) - 1, this.header - 4, 1, this.rows.length * this.rowHeight + 4);
    }
    pen.globalAlpha = 1;
  }

  drawStrip(pen, colours, strip, top, height) {
    const signed = strip.ends[0] < 0;
    const zero = signed ? top + height / 2 : top + height;
    pen.fillStyle = colours.none;
    pen.fillRect(0, top, this.width * this.columns.length, height);
    const most = Math.max(Math.abs(strip.ends[0]), Math.abs(strip.ends[1])) || 1;
    strip.values.forEach((value, c) => {
      if (value === null) return;
      const size = (clamp(Math.abs(value) / most, 0, 1) * height) / (signed ? 2 : 1);
      pen.fillStyle = mixed(value < 0 ? colours.warm : colours.cool, colours.cool, 0);
      pen.fillRect(this.edge(c), value < 0 ? zero : zero - size, Math.max(1, this.edge(c + 1) - this.edge(c) - 1), size);
    });
    pen.fillStyle = colours.faint;
    pen.fillRect(0, Math.min(zero, top + height - 0.5), this.width * this.columns.length, 0.5);
  }

  drawMarks(pen, colours) {
    pen.lineWidth = 2;
    pen.strokeStyle = colours.focus;
    if (this.selection) {
      const [r0, r1, c0, c1] = this.selection;
      const top = this.header + r0 * this.rowHeight;
      pen.strokeRect(c0 * this.width + 0.5, top, (c1 - c0 + 1) * this.width - 1, (r1 - r0 + 1) * this.rowHeight - 1);
    }
    if (this.cursor) {
      const [r, c] = this.cursor;
      pen.lineWidth = 1.5;
      pen.strokeStyle = colours.ink;
      pen.strokeRect(c * this.width, this.header + r * this.rowHeight, Math.max(3, this.width - 1), this.rowHeight - 1);
    }
  }

  drawNames(stripHeight) {
    const heights = [this.header, ...this.rows.map(() => this.rowHeight), ...this.strips.map(() => stripHeight + 8)];
    const titles = [this.header > 10 ? "layer" : "", ...this.rows, ...this.strips.map((s) => s.name)];
    if (this.names.childElementCount !== titles.length) {
      this.names.replaceChildren(...titles.map((text) => element("div", { title: text }, text)));
    }
    [...this.names.children].forEach((child, i) => {
      child.style.height = child.style.lineHeight = `${heights[i]}px`;
      child.textContent = titles[i];
      child.classList.toggle("strip", i === 0 || i > this.rows.length);
      child.classList.toggle("on", this.cursor !== null && i === this.cursor[0] + 1);
    });
  }

  drawScale(colours) {
    const canvas = this.scale.querySelector("canvas") || element("canvas", { width: 90, height: 10, "aria-hidden": "true" });
    const pen = canvas.getContext("2d");
    for (let x = 0; x < 90; x++) {
      pen.fillStyle = colours.of(((x - 44.5) / 44.5) * this.limit, this.limit);
      pen.fillRect(x, 0, 1, 10);
    }
    this.scale.replaceChildren(shownNumber(-this.limit), canvas, shownNumber(this.limit));
  }

  listen() {
    let start = null;
    const cell = (event) => {
      const box = this.canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left) / this.width);
      const row = Math.floor((event.clientY - box.top - this.header) / this.rowHeight);
      const inside = column >= 0 && column < this.columns.length && row >= 0;
      return inside ? [clamp(row, 0, this.rows.length - 1), column, row < this.rows.length] : null;
    };
    this.canvas.addEventListener("pointermove", (event) => {
      const at = cell(event);
      if (!at) return;
      if (start) this.select(start, at);
      else if (at[2]) this.move(at[0], at[1]);
      else this.readColumn(at[1]);
    });
    this.canvas.addEventListener("pointerleave", () => { if (!start) this.move(null); });
    this.canvas.addEventListener("pointerdown", (event) => {
      const at = cell(event);
      if (!this.selectable || !at || !at[2] || event.pointerType === "touch") return;
      start = at;
      this.canvas.setPointerCapture(event.pointerId);
      this.select(at, at);
    });
    for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, () => { start = null; });
    this.canvas.addEventListener("click", (event) => { // a touch selects one cell, so that it can scroll
      const at = cell(event);
      if (this.selectable && at && at[2] && event.pointerType === "touch") this.select(at, at);
    });
    this.field.addEventListener("keydown", (event) => this.key(event));
    this.field.addEventListener("focus", () => { if (!this.cursor && this.field.matches(":focus-visible")) this.move(0, 0); });
  }

  key(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      Home: [0, -1e6], End: [0, 1e6], PageUp: [-1e6, 0], PageDown: [1e6, 0] };
    const step = steps[event.key];
    if (step && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      const [r, c] = this.cursor || [0, 0];
      const next = [clamp(r + step[0], 0, this.rows.length - 1), clamp(c + step[1], 0, this.columns.length - 1)];
      if (event.shiftKey && this.selectable) {
        this.anchor = this.selection && this.anchor ? this.anchor : [r, c];
        this.select(this.anchor, next);
      } else this.anchor = null;
      this.move(...next);
      this.show(next[1]);
    } else if ((event.key === " " || event.key === "Enter") && this.selectable && this.cursor) {
      event.preventDefault();
      this.select(this.cursor, this.cursor);
    } else if (event.key === "Escape" && this.selection) {
      this.clear();
    } else if (["+", "-", "="].includes(event.key) && this.onStep && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      if (!this.selection && this.cursor) this.select(this.cursor, this.cursor);
      this.onStep(event.key === "-" ? -0.05 : 0.05);
    }
  }

  show(column) {
    const left = column * this.width;
    if (left < this.field.scrollLeft || left + this.width > this.field.scrollLeft + this.field.clientWidth) {
      this.field.scrollLeft = left - this.field.clientWidth / 2;
    }
  }

  move(row, column) {
    this.cursor = row === null ? null : [row, column];
    if (this.cursor) this.read(row, column);
    this.draw();
  }

  read(row, column) {
    const { label, kind } = this.columns[column];
    const about = kind ? ` (${kind})` : "";
    this.reading.textContent = `${this.rows[row]} \u00b7 ${label}${about}: ${shownNumber(this.values[row][column])}`;
  }

  readColumn(column) {
    const bars = this.strips.map((strip) => `${strip.name} ${shownNumber(strip.values[column])}`);
    if (bars.length) this.reading.textContent = `${this.columns[column].label}: ${bars.join(", ")}`;
  }

  select(one, two) {
    this.selection = [Math.min(one[0], two[0]), Math.max(one[0], two[0]), Math.min(one[1], two[1]), Math.max(one[1], two[1])];
    this.draw();
    this.onSelect(this.selection);
  }

  clear() {
    this.selection = this.anchor = null;
    this.draw();
    this.onSelect(null);
  }
}

// ------------------------------------------------------------------------------------------------ where answers come from

class DeskError extends Error {}

// Requests to the server that sent the page; the token is in the page's own address.
export class ServerSource {
  constructor(address = location.href) {
    this.token = new URL(address).searchParams.get("token") || "";
  }

  async send(path, body, more = {}) {
    const options = { headers: { "X-Aniso-Token": this.token, ...more }, credentials: "omit" };
    if (body !== undefined) Object.assign(options, { method: "POST", body });
    let answer;
    try {
      answer = await fetch(path, options);
    } catch {
      throw new DeskError("The server does not answer. Start aniso explore again; this page keeps its state until it is closed.");
    }
    if (answer.ok) return answer;
    const problem = await answer.json().catch(() => ({ message: `status ${answer.status}` }));
    throw new DeskError([problem.message, problem.fix].filter(Boolean).join(": "));
  }

  async ask(path, body) {
    return (await this.send(path, body === undefined ? undefined : JSON.stringify(body))).json();
  }

  async bytes(path, body) {
    return (await this.send(path, JSON.stringify(body))).arrayBuffer();
  }

  async upload(file) {
    return (await this.send("/items/image", file, { "X-Aniso-Name": encodeURIComponent(file.name) })).json();
  }
}

// The same requests as messages of a notebook widget.
// A buffer of a notebook may be a view of a part of a message.
function bytesOf(view) {
  return view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
}

class WidgetSource {
  constructor(model) {
    this.model = model;
    this.waiting = new Map();
    this.next = 1;
    model.on("msg:custom", (message, buffers) => {
      const { resolve, reject } = this.waiting.get(message.id) || {};
      this.waiting.delete(message.id);
      if (message.problem !== undefined) reject?.(new DeskError(message.problem));
      else resolve?.(buffers && buffers.length ? bytesOf(buffers[0]) : message.answer);
    });
  }

  ask(path, body) {
    const id = this.next++;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.model.send({ id, path, body: body ?? null });
    });
  }

  bytes(path, body) {
    return this.ask(path, body);
  }

  async upload(file) {
    const data = new Uint8Array(await file.arrayBuffer());
    let text = "";
    for (const byte of data) text += String.fromCharCode(byte);
    return this.ask("/items/image", { name: file.name, content: btoa(text) });
  }
}

// ------------------------------------------------------------------------------------------------ the desk

export class Desk {
  constructor(root, source, facts, keyTarget) {
    Object.assign(this, { root, source, facts, keyTarget });
    this.slots = Object.fromEntries(SLOTS.map((slot) => [slot, new History(facts.values)]));
    this.results = {};
    this.active = "A";
    this.mode = "shift";
    this.tab = "vectors";
    this.only = null; // the vector that layers and kinds act on
    this.measuring = false;
    this.gesture = null;
    this.cells = [];
    facts.values.forEach((row, r) => row.forEach((x, c) => { if (x !== null) this.cells.push([r, c]); }));
    this.build();
    this.refresh();
    this.measure();
    this.waitForGeometry();
  }

  get values() {
    return this.slots[this.active].values;
  }

  // building the page

  build() {
    const { facts } = this;
    this.state = element("span", { class: "state", role: "status", "data-busy": "false" });
    this.problem = element("p", { class: "problem", role: "alert" });
    this.undoButton = this.button("Undo", () => this.undo(), "Undo (Ctrl+Z)");
    this.redoButton = this.button("Redo", () => this.redo(), "Redo (Ctrl+Shift+Z)");
    this.slotButtons = SLOTS.map((slot) => this.button(slot, () => this.use(slot), `Show ${slot}`));
    this.differenceButton = this.button("A \u2212 B", () => this.toggleDifference(), "Show the difference on the map");
    const bar = element("div", { class: "bar", role: "toolbar", "aria-label": "Desk" },
      element("h1", {}, facts.title), element("span", { class: "gap" }), this.state,
      element("span", { class: "group" }, element("label", { for: "preset" }, "Preset"), this.presetList()),
      element("span", { class: "group" }, this.undoButton, this.redoButton,
        this.button("Reset", () => this.commit(facts.values), "Back to the coefficients as opened")),
      element("span", { class: "group", role: "group", "aria-label": "Compare" }, ...this.slotButtons,
        this.button("Copy to other", () => this.copy(), "Copy the shown coefficients to the other of A and B"),
        this.differenceButton));
    const left = element("div", { class: "stack" }, this.mapCard(), this.sliderCard(), this.similarityCard());
    const right = element("div", { class: "stack results" }, ...this.resultCards(), this.keepCard());
    this.root.replaceChildren(bar, this.problem, element("div", { class: "columns" }, left, right));
    this.keyTarget.addEventListener("keydown", (event) => this.key(event));
  }

  button(text, act, title = text) {
    return element("button", { type: "button", title, "aria-label": title.startsWith(text) ? text : `${text}: ${title}`, onclick: act }, text);
  }

  presetList() {
    const groups = new Map();
    for (const preset of this.facts.presets) {
      if (!groups.has(preset.group)) groups.set(preset.group, element("optgroup", { label: preset.group }));
      groups.get(preset.group).append(element("option", { value: preset.name }, preset.label));
    }
    const list = element("select", { id: "preset" }, element("option", { value: "" }, "choose \u2026"), ...groups.values());
    list.addEventListener("change", async () => {
      const name = list.value;
      if (!name) return;
      const found = await this.attempt(() => this.source.ask("/preset", { name }));
      if (found) this.commit(found.values);
    });
    this.preset = list;
    return list;
  }

  mapCard() {
    const root = element("div");
    const { vectors, blocks } = this.facts;
    this.map = new HeatMap(root, { rows: vectors, columns: blocks, values: this.values, label: "Coefficients", selectable: true });
    this.map.onSelect = () => this.showSelection();
    this.map.onStep = (step) => this.nudge(step);
    const head = element("div", { class: "head" }, element("h2", {}, "Coefficients"),
      element("span", { class: "faint" }, `${vectors.length} vectors by ${blocks.length} blocks, input to output; drag to select`),
      element("span", { class: "gap" }), element("span", { class: "map" }, this.map.scale));
    return element("section", { class: "card", "aria-label": "Coefficients" }, head, root);
  }

  sliderCard() {
    const tabs = { vectors: "Vectors", layers: "Layers", kinds: "Kinds of block" };
    this.tabButtons = Object.entries(tabs).map(([name, text]) =>
      element("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "sliders", onclick: () => this.showTab(name) }, text));
    const tablist = element("div", { role: "tablist", "aria-label": "Sliders" }, ...this.tabButtons);
    tablist.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      const names = Object.keys(tabs);
      const next = (names.indexOf(this.tab) + step + names.length) % names.length;
      this.showTab(names[next]);
      this.tabButtons[next].focus();
    });
    const modes = { shift: "shift: keep differences", scale: "scale: keep ratios", set: "set: make equal" };
    const mode = element("select", { id: "mode", onchange: (event) => { this.mode = event.target.value; } },
      ...Object.entries(modes).map(([name, text]) => element("option", { value: name }, text)));
    const only = element("select", { id: "only", onchange: (event) => { this.only = event.target.value || null; this.fillSliders(); } },
      element("option", { value: "" }, "all vectors"), ...this.facts.vectors.map((name) => element("option", { value: name }, name)));
    this.onlyGroup = element("span", { class: "group" }, element("label", { for: "only" }, "of"), only);
    this.selected = element("div", { class: "selected", hidden: true });
    this.sliders = element("div", { class: "sliders", id: "sliders", role: "tabpanel" });
    const head = element("div", { class: "head" }, tablist, this.onlyGroup, element("span", { class: "gap" }),
      element("span", { class: "group" }, element("label", { for: "mode" }, "A slider moves the mean"), mode));
    this.showTab("vectors");
    return element("section", { class: "card", "aria-label": "Sliders" }, head, this.selected, this.sliders);
  }

  resultCards() {
    this.scores = element("div", { class: "scores" });
    this.detail = element("p", { class: "faint" });
    this.items = element("div", { class: "items" });
    const notes = this.facts.notes.map((note) => element("p", { class: "faint" }, note));
    const cards = [];
    if (this.facts.has_sample || notes.length) {
      cards.push(element("section", { class: "card accuracy", "aria-label": "Accuracy" }, element("h2", {}, "Accuracy on validation data"),
        ...(this.facts.has_sample ? [this.scores, this.detail] : []), ...notes));
    }
    if (this.facts.classes.length) {
      cards.push(element("section", { class: "card", "aria-label": "Predictions" }, element("h2", {}, "Predictions"), this.items, this.adder()));
    }
    return cards;
  }

  adder() {
    if (this.facts.item_kind === "texts") {
      const text = element("textarea", { id: "new-text", placeholder: "Write a text" });
      const add = this.button("Add text", async () => {
        const found = await this.attempt(() => this.source.ask("/items/text", { text: text.value }));
        if (found) { text.value = ""; this.changeItems(found.items); }
      });
      return element("div", { class: "add" }, element("label", { for: "new-text", class: "faint" }, "Add a text of your own"), text, element("div", {}, add));
    }
    const files = element("input", { type: "file", id: "new-image", accept: "image/*", multiple: true });
    files.addEventListener("change", async () => {
      for (const file of [...files.files]) {
        const found = await this.attempt(() => this.source.upload(file));
        if (found) this.changeItems(found.items);
      }
      files.value = "";
    });
    return element("div", { class: "add" }, element("label", { for: "new-image", class: "faint" }, "Add images of your own; they stay on this machine"), files);
  }

  keepCard() {
    this.commandText = element("pre", { "aria-label": "Command" });
    this.kept = element("p", { class: "faint", role: "status" });
    const copy = this.button("Copy command", async () => {
      try {
        await navigator.clipboard.writeText(this.commandText.textContent);
        this.kept.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(this.commandText);
        this.kept.textContent = "press Ctrl+C to copy the selected command";
      }
    });
    const bake = this.button("Bake", () => this.bake(), "Bake: write the composed model");
    bake.disabled = !this.facts.can_bake;
    const hint = this.facts.can_bake ? "" : "To bake from here, start aniso explore with -o DIR and --base.";
    const keys = [["Ctrl+Z", "undo"], ["X", "A or B"], ["Shift+arrows", "select on the map"], ["+ \u2212", "change the selection"], ["Esc", "clear"]];
    return element("section", { class: "card", "aria-label": "Keep" }, element("h2", {}, "Keep"),
      element("div", { class: "acts" }, this.button("Save coefficients", () => this.save()), bake, copy), this.kept,
      ...(hint ? [element("p", { class: "faint" }, hint)] : []), this.commandText,
      element("p", { class: "keys" }, ...keys.flatMap(([key, text]) => [element("kbd", {}, key), ` ${text}  `])));
  }

  similarityCard() {
    this.similarity = element("div");
    this.similarityScale = element("span", { class: "map" });
    const note = element("p", { class: "faint" }, "Cosines between task vectors over all blocks: 1 points the same way, 0 is orthogonal.");
    this.similarityNote = element("p", { class: "faint" }, "computing \u2026");
    return element("details", { class: "card" }, element("summary", {}, "Similarity of vectors"), note, this.similarityScale, this.similarityNote, this.similarity);
  }

  // sliders

  showTab(name) {
    this.tab = name;
    this.tabButtons.forEach((button) => {
      const on = button.id === `tab-${name}`;
      button.setAttribute("aria-selected", String(on));
      button.tabIndex = on ? 0 : -1;
    });
    this.onlyGroup.hidden = name === "vectors";
    this.onlyGroup.style.display = name === "vectors" ? "none" : "";
    this.sliders.setAttribute("aria-labelledby", `tab-${name}`);
    this.fillSliders();
  }

  fillSliders() {
    this.controls = this.groups().filter(({ cells }) => cells.length).map(({ name, cells }) => this.slider(name, cells));
    this.sliders.replaceChildren(...this.controls.map((control) => control.root));
    this.showSliders();
  }

  groups() {
    const { vectors, blocks } = this.facts;
    const where = (test) => this.cells.filter(test);
    if (this.tab === "vectors") return vectors.map((name, r) => ({ name, cells: where(([row]) => row === r) }));
    const own = this.only === null ? () => true : ([row]) => vectors[row] === this.only;
    if (this.tab === "kinds") {
      const kinds = [...new Set(blocks.map((block) => block.kind))];
      return kinds.map((kind) => ({ name: kind, cells: where((cell) => own(cell) && blocks[cell[1]].kind === kind) }));
    }
    const ranges = layerRanges(blocks).map(([low, high]) => ({
      name: low === high ? `layer ${low}` : `layers ${low} to ${high}`,
      cells: where((cell) => own(cell) && blocks[cell[1]].depth !== null && blocks[cell[1]].depth >= low && blocks[cell[1]].depth <= high),
    }));
    return [...ranges, { name: "outside layers", cells: where((cell) => own(cell) && blocks[cell[1]].depth === null) }];
  }

  slider(name, cells, ...more) {
    const id = `slider-${(Desk.count = (Desk.count || 0) + 1)}`;
    const range = element("input", { type: "range", id, min: "-1", max: "1.5", step: "0.01" });
    const number = element("input", { type: "number", step: "0.01", "aria-label": `${name}, number` });
    const control = { cells, range, number, root: element("div", { class: "slider" }, element("label", { for: id, title: name }, name), range, number, ...more) };
    range.addEventListener("input", () => this.drag(control, Number(range.value)));
    range.addEventListener("change", () => this.drop(control));
    number.addEventListener("change", () => {
      if (number.value === "" || !Number.isFinite(Number(number.value))) return this.showSliders();
      this.drag(control, Number(number.value));
      this.drop(control);
    });
    return control;
  }

  // While a slider is held, all is computed from the coefficients at its beginning, so that nothing adds up.
  drag(control, target) {
    if (!this.gesture || this.gesture.control !== control) this.gesture = { control, start: this.values };
    this.gesture.values = moved(this.gesture.start, control.cells, clamp(target, -LIMIT, LIMIT), this.mode);
    this.slots[this.active].values = this.gesture.values;
    this.refresh(control);
    this.measure();
  }

  drop(control) {
    if (!this.gesture) return;
    const { start, values } = this.gesture;
    this.gesture = null;
    this.slots[this.active].values = start;
    this.commit(values, control);
  }

  commit(values, what = null) {
    this.slots[this.active].push(values, what);
    this.refresh(what);
    this.measure();
  }

  showSelection() {
    const selection = this.map.selection;
    this.selected.hidden = !selection;
    if (!selection) return;
    const [r0, r1, c0, c1] = selection;
    const cells = this.cells.filter(([r, c]) => r >= r0 && r <= r1 && c >= c0 && c <= c1);
    const size = `${r1 - r0 + 1} \u00d7 ${c1 - c0 + 1}`;
    const name = cells.length === 1 ? "1 selected cell" : `${cells.length} selected cells (${size})`;
    this.selectedControl = this.slider(name, cells, this.button("Clear", () => this.map.clear(), "Clear the selection"));
    this.selected.replaceChildren(this.selectedControl.root);
    this.showSliders();
  }

  nudge(step) {
    const control = this.selectedControl;
    if (!this.map.selection || !control || !control.cells.length) return;
    this.drag(control, mean(this.values, control.cells) + step);
    this.drop(control);
  }

  showSliders(except = null) {
    const shown = this.map && this.map.selection && this.selectedControl ? [...this.controls, this.selectedControl] : this.controls;
    for (const control of shown) {
      const value = mean(this.values, control.cells);
      control.range.min = String(Math.min(-1, Math.floor(value)));
      control.range.max = String(Math.max(1.5, Math.ceil(value)));
      if (control !== except || document.activeElement !== control.range) control.range.value = String(value);
      control.range.setAttribute("aria-valuetext", shownNumber(value));
      const [low, high] = [Number(control.range.min), Number(control.range.max)];
      const at = (x) => `${(100 * (clamp(x, low, high) - low)) / (high - low)}%`;
      control.range.style.setProperty("--nought", at(0));
      control.range.style.setProperty("--low", at(Math.min(0, value)));
      control.range.style.setProperty("--high", at(Math.max(0, value)));
      if (document.activeElement !== control.number || control !== except) control.number.value = String(rounded(Number(value.toFixed(4))));
    }
  }

  // history and comparison

  undo() {
    if (this.slots[this.active].undo()) { this.refresh(); this.measure(); }
  }

  redo() {
    if (this.slots[this.active].redo()) { this.refresh(); this.measure(); }
  }

  use(slot) {
    this.active = slot;
    this.refresh();
    this.measure();
  }

  copy() {
    const other = SLOTS.find((slot) => slot !== this.active);
    this.slots[other].push(this.values);
    this.results[other] = this.results[this.active];
    this.refresh();
  }

  toggleDifference() {
    this.difference = !this.difference;
    this.refresh();
  }

  key(event) {
    const typing = event.target.matches?.("input[type=number], textarea, select");
    const command = event.ctrlKey || event.metaKey;
    const name = event.key.toLowerCase();
    if (typing) return;
    if (command && name === "z" && !event.shiftKey) { event.preventDefault(); this.undo(); }
    else if (command && (name === "y" || (name === "z" && event.shiftKey))) { event.preventDefault(); this.redo(); }
    else if (!command && name === "x") this.use(SLOTS.find((slot) => slot !== this.active));
  }

  refresh(control = null) {
    const history = this.slots[this.active];
    this.undoButton.disabled = !history.past.length;
    this.redoButton.disabled = !history.future.length;
    SLOTS.forEach((slot, i) => this.slotButtons[i].setAttribute("aria-pressed", String(slot === this.active)));
    this.differenceButton.setAttribute("aria-pressed", String(Boolean(this.difference)));
    const [a, b] = SLOTS.map((slot) => this.slots[slot].values);
    const shown = this.difference ? a.map((row, r) => row.map((x, c) => (x === null ? null : rounded(x - b[r][c])))) : this.values;
    this.map.update(shown, this.strips());
    this.showSliders(control);
    this.showResults();
    if (control === null) this.preset.value = "";
    clearTimeout(this.commandTimer);
    this.commandTimer = setTimeout(() => this.showCommand(), 250);
  }

  // answers of the server

  async attempt(act) {
    try {
      const found = await act();
      this.problem.textContent = "";
      return found;
    } catch (error) {
      if (!(error instanceof DeskError)) throw error;
      this.problem.textContent = error.message;
      return null;
    }
  }

  // One request at a time; the newest coefficients are sent next. A sample is measured in several answers.
  async measure() {
    this.wanted = this.values;
    this.begun = performance.now();
    if (this.measuring) return;
    this.measuring = true;
    let timer = setInterval(() => this.showState(), 100);
    let complete = false;
    while (!complete || this.wanted !== this.measured) {
      const sent = this.wanted;
      const slot = SLOTS.find((name) => this.slots[name].values === sent) || this.active;
      const found = await this.attempt(() => this.source.ask("/measure", { values: sent }));
      if (!found) {
        this.failed = true;
        break;
      }
      this.failed = false;
      this.measured = sent;
      complete = found.complete;
      if (sent === this.wanted) {
        this.results[slot] = { ...found, values: sent };
        if (complete) this.took = performance.now() - this.begun;
        this.map.update(this.map.values, this.strips());
        this.showResults();
      }
    }
    clearInterval(timer);
    this.measuring = false;
    this.showState();
  }

  showState() {
    const busy = this.measuring && performance.now() - this.begun > SLOW;
    this.state.dataset.busy = String(busy);
    const found = this.results[this.active];
    const rest = found && found.total ? `: ${found.done} of ${found.total} items` : " \u2026";
    const done = found && found.recomposed !== undefined && this.took !== undefined ? `measured in ${Math.round(this.took)} ms` : "";
    this.state.textContent = busy ? `computing${rest}` : this.failed ? "no answer" : done;
  }

  strips() {
    const found = this.results[this.active];
    if (!found || !found.norms) return [];
    const most = Math.max(1e-9, ...found.norms.filter((x) => x !== null));
    return [
      { name: this.relative ? "change / base" : "change", values: found.norms, ends: [0, most] },
      { name: "interference", values: found.interference, ends: [-1, 1] },
    ];
  }

  showResults() {
    if (this.facts.has_sample) {
      this.scores.replaceChildren(...SLOTS.map((slot) => this.score(slot)));
      const [a, b] = SLOTS.map((slot) => this.results[slot]);
      const gap = a && b && a.done && b.done ? 100 * (a.correct / a.done - b.correct / b.done) : null;
      this.detail.textContent = gap === null ? "" : `A \u2212 B: ${gap >= 0 ? "+" : "\u2212"}${Math.abs(gap).toFixed(1)} points`;
    }
    this.showItems();
  }

  score(slot) {
    const found = this.results[slot];
    const box = element("div", { class: "score", "data-active": String(slot === this.active), "data-slot": slot });
    if (!found || !found.done) {
      box.append(`${slot}`, element("b", {}, "\u2013"), element("span", {}, "not measured"));
      return box;
    }
    const [low, high] = found.interval.map((x) => (100 * x).toFixed(0));
    box.append(slot, element("b", {}, percent(found.correct / found.done)),
      element("span", {}, `${low} to ${high} %, ${found.correct} of ${found.done}${found.complete ? "" : " so far"}`));
    return box;
  }

  changeItems(items) {
    this.facts.items = items;
    this.showItems();
    this.measured = null;
    this.measure();
  }

  showItems() {
    const found = this.results[this.active];
    const ranked = new Map((found?.items || []).map((item) => [item.number, item.ranked]));
    this.items.replaceChildren(...this.facts.items.map((item) => this.item(item, ranked.get(item.number) || [])));
  }

  item(item, ranked) {
    const bars = ranked.map(([name, share]) => {
      const bar = element("i");
      bar.style.width = `${100 * share}%`;
      return element("div", { class: name === item.label ? "rank right" : "rank" }, bar, element("span", { title: name }, name), element("span", {}, percent(share)));
    });
    const about = element("div", {}, ...(item.text === null ? [] : [element("p", { class: "words" }, item.text)]), ...bars,
      ...(item.label ? [element("span", { class: "faint" }, `true class: ${item.label}`)] : []));
    const away = element("button", { type: "button", class: "away", "aria-label": `Remove ${item.name}`, onclick: async () => {
      const left = await this.attempt(() => this.source.ask("/items/remove", { number: item.number }));
      if (left) this.changeItems(left.items);
    } }, "\u00d7");
    const picture = item.image ? [element("img", { src: item.image, alt: item.name, title: item.name })] : [];
    return element("div", { class: item.image ? "item" : "item text" }, ...picture, about, away);
  }

  async waitForGeometry() {
    for (;;) {
      const found = await this.attempt(() => this.source.ask("/geometry"));
      if (!found || found.error) {
        this.similarityNote.textContent = found ? found.error : "not known";
        return;
      }
      if (found.ready) {
        this.relative = found.relative;
        this.showSimilarity(found.cosines);
        this.measured = null;
        this.measure();
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, 300));
    }
  }

  showSimilarity(cosines) {
    this.similarityNote.textContent = "";
    const names = this.facts.vectors;
    const columns = names.map((label) => ({ label, depth: null, kind: "" }));
    const map = new HeatMap(this.similarity, { rows: names, columns, values: cosines, label: "Cosines between vectors", limit: 1 });
    this.similarityScale.replaceChildren(map.scale);
  }

  async showCommand() {
    const values = this.values;
    const found = await this.attempt(() => this.source.ask("/command", { values }));
    if (found && values === this.values) this.commandText.textContent = `${found.make}\n${found.bake}`;
  }

  async save() {
    const content = await this.attempt(() => this.source.bytes("/save", { values: this.values }));
    if (!content) return;
    const address = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
    element("a", { href: address, download: "coefficients.safetensors" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
    this.kept.textContent = "saved coefficients.safetensors";
  }

  async bake() {
    this.kept.textContent = "baking \u2026";
    const found = await this.attempt(() => this.source.ask("/bake", { values: this.values }));
    this.kept.textContent = found ? `wrote ${found.path}` : "";
  }
}

// At most four ranges of about as many layers.
export function layerRanges(blocks) {
  const depths = [...new Set(blocks.map((block) => block.depth).filter((depth) => depth !== null))].sort((a, b) => a - b);
  const count = Math.min(4, depths.length);
  return Array.from({ length: count }, (_, i) => {
    const own = depths.slice(Math.round((i * depths.length) / count), Math.round(((i + 1) * depths.length) / count));
    return [own[0], own[own.length - 1]];
  });
}

// Keys are those of the whole page, or of another element that has focus.
export async function startDesk(root, source = new ServerSource(), keyTarget = document) {
  try {
    return new Desk(root, source, await source.ask("/desk"), keyTarget);
  } catch (error) {
    root.append(element("p", { class: "problem", role: "alert" }, error.message));
    return null;
  }
}

// ------------------------------------------------------------------------------------------------ reports

// The number that a cell begins with, or its text; a dash stands for nothing.
export function sortKey(text) {
  const plain = text.trim().replace(/\u2212/g, "-").replace(/,(?=\d{3})/g, "");
  const number = /^[-+]?\d+(\.\d+)?(e[-+]?\d+)?(?=$|\s|%)/i.exec(plain);
  if (number) return [0, Number(number[0])];
  return plain === "" || plain === "\u2013" ? [2, 0] : [1, plain.toLowerCase()];
}

function compared(a, b) {
  if (a[0] !== b[0]) return a[0] - b[0];
  return a[1] < b[1] ? -1 : a[1] > b[1] ? 1 : 0;
}

// Buttons in the header sort upwards, downwards, and back to the order of the report.
function makeSortable(table) {
  const body = table.tBodies[0];
  const heads = [...(table.tHead?.rows[0]?.cells || [])];
  if (!body || body.rows.length < 2) return;
  const original = [...body.rows];
  heads.forEach((head, column) => {
    const text = head.textContent;
    const act = () => {
      const next = { none: "descending", descending: "ascending", ascending: "none" }[head.getAttribute("aria-sort") || "none"];
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (next !== "none") head.setAttribute("aria-sort", next);
      const keys = new Map(original.map((row) => [row, sortKey(row.cells[column]?.textContent || "")]));
      const rows = next === "none" ? original : original.slice().sort((one, two) => {
        const [a, b] = [keys.get(one), keys.get(two)];
        if ((a[0] === 2) !== (b[0] === 2)) return a[0] - b[0]; // what is missing stays last
        return next === "ascending" ? compared(a, b) : compared(b, a);
      });
      body.append(...rows);
    };
    head.replaceChildren(element("button", { type: "button", class: "sort", title: "Sort by this column", onclick: act }, text || "\u00a0"));
  });
}

// A heat map with values under the pointer takes the place of its picture.
function showMap(holder) {
  const { rows, columns, values } = JSON.parse(holder.textContent);
  const figure = holder.closest("figure");
  const root = element("div");
  const picture = figure.querySelector("img");
  figure.insertBefore(root, picture);
  const map = new HeatMap(root, { rows, columns, values: values[""], label: picture.alt, rowHeight: rows.length > 12 ? 18 : 24 });
  picture.hidden = true;
  root.after(element("span", { class: "map" }, map.scale));
  figure.addEventListener("seed", (event) => map.update(values[event.detail] || values[""]));
}

// Buttons above an experiment hide methods, and show one seed alone.
function addToggles(sections) {
  const [first] = sections;
  const methods = JSON.parse(first.dataset.methods || "[]");
  const hidden = new Set();
  const apply = () => sections.forEach((section) => hideMethods(section, methods, hidden));
  const bars = [];
  if (methods.length > 1) {
    const buttons = methods.map((name) => element("button", { type: "button", "aria-pressed": "true", onclick: (event) => {
      if (!hidden.delete(name)) hidden.add(name);
      event.target.setAttribute("aria-pressed", String(!hidden.has(name)));
      apply();
    } }, name));
    bars.push(element("div", { class: "tools", role: "group", "aria-label": "Methods" }, element("span", {}, "Methods"), ...buttons));
  }
  const seeds = [...new Set(sections.flatMap((section) => [...section.querySelectorAll("[data-seed]")].map((e) => e.dataset.seed)))];
  if (seeds.length > 1) {
    const buttons = seeds.map((seed) => element("button", { type: "button", class: "pick", "aria-pressed": String(seed === ""), onclick: (event) => {
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === event.target)));
      for (const section of sections) {
        const own = [...section.querySelectorAll(":scope > [data-seed]")];
        const shown = own.find((e) => e.dataset.seed === seed) || own[0];
        own.forEach((e) => { e.hidden = e !== shown; });
        section.querySelectorAll("figure").forEach((figure) => figure.dispatchEvent(new CustomEvent("seed", { detail: seed })));
      }
    } }, seed === "" ? "all" : seed));
    bars.push(element("div", { class: "tools", role: "group", "aria-label": "Seeds" }, element("span", {}, "Seeds"), ...buttons));
  }
  first.querySelector("h2").after(...bars);
}

function hideMethods(section, methods, hidden) {
  if (section.dataset.method) section.hidden = hidden.has(section.dataset.method);
  for (const table of section.querySelectorAll("table:not(.matrix)")) {
    const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
    for (const row of table.rows) {
      [...row.cells].forEach((cell, c) => { if (c && methods.includes(heads[c])) cell.hidden = hidden.has(heads[c]); });
    }
    for (const row of table.tBodies[0].rows) row.hidden = hidden.has(row.cells[0].textContent.trim());
  }
}

export function enhanceReport(root) {
  root.querySelectorAll("table:not(.matrix)").forEach(makeSortable);
  root.querySelectorAll("script[data-map]").forEach(showMap);
  const experiments = new Map();
  for (const section of root.querySelectorAll("section[data-experiment]")) {
    const name = section.dataset.experiment;
    experiments.set(name, [...(experiments.get(name) || []), section]);
  }
  experiments.forEach(addToggles);
}

// ------------------------------------------------------------------------------------------------ notebooks

export default {
  render({ model, el }) {
    const root = element("div", { class: "desk", "data-lm-suppress-shortcuts": "true" }); // read by JupyterLab
    el.append(element("div", { class: "frame" }, root));
    startDesk(root, new WidgetSource(model), root);
    root.addEventListener("keydown", (event) => event.stopPropagation()); // else the notebook acts on it, too
  },
};
