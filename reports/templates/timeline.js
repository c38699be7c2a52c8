"use strict";
// The timeline: unpacks the columns that reports/live.py packed and draws them on a canvas.
class LiveTimeline {
  constructor(root) {
    this.root = root;
    this.canvas = root.querySelector("canvas");
    this.view = root.querySelector(".view");
    this.room = root.querySelector(".room");
    this.details = root.querySelector(".span");
    this.found = root.querySelector(".found");
    const packed = root.querySelector(".packed");
    this.kindColours = JSON.parse(packed.dataset.kinds);
    this.roleColours = JSON.parse(packed.dataset.roles);
    this.show = { critical: true, exposed: true, folded: true, host: false };
    this.matches = null;
    this.chosen = null; // {panel, span}
    this.memoryOf = null; // {panel, memory}
  }

  async start() {
    await this.unpack(this.root.querySelector(".packed").textContent.trim());
    this.longest = Math.max(...this.panels.map((panel) => panel.length * panel.unit_s));
    this.from = 0;
    this.to = this.longest;
    if (this.panels.every((panel) => panel.rows.length <= 8)) this.setShown("folded", false);
    this.listen();
    this.legend();
    this.layout();
    this.root.dataset.ready = "yes";
  }

  async unpack(text) {
    const deflated = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = await new Response(stream).arrayBuffer();
    const size = new DataView(bytes).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, size)));
    const numbers = new Int32Array(bytes.slice(4 + size));
    let at = 0;
    const take = (length) => numbers.subarray(at, (at += length));
    this.kinds = header.kinds;
    this.limit = header.limit_bytes;
    this.panels = header.panels;
    for (const panel of this.panels) {
      const columns = panel.columns.map(take);
      const [lane, start, length, name, cause] = columns;
      for (let i = 1; i < lane.length; i++) {
        lane[i] += lane[i - 1];
        if (lane[i] === lane[i - 1]) start[i] += start[i - 1];
      }
      Object.assign(panel, { lane, start, length_of: length, name, cause });
      panel.lanes = LiveTimeline.lanes(lane, start, length, 3 * panel.rows.length);
      panel.exposed = LiveTimeline.stretches(columns.slice(5, 8));
      panel.critical = LiveTimeline.stretches(columns.slice(8, 11));
      let next = 11;
      for (const memory of panel.memory) {
        const summed = (column) => { let sum = 0; return Float64Array.from(column, (each) => (sum += each)); };
        memory.times = summed(columns[next++]);
        memory.sizes = memory.roles.map(() => summed(columns[next++]).map((each) => each * panel.byte_unit));
      }
    }
  }

  // Of every lane the first span, the one after the last, and the running maximum of ends, for finding what is in view.
  static lanes(lane, start, length, count) {
    const lanes = Array.from({ length: count }, () => ({ first: 0, last: 0 }));
    const reach = new Int32Array(lane.length);
    for (let i = 0; i < lane.length; i++) {
      const mine = lanes[lane[i]];
      const end = start[i] + length[i];
      if (mine.last === 0) mine.first = i;
      reach[i] = i > mine.first ? Math.max(reach[i - 1], end) : end;
      mine.last = i + 1;
    }
    for (const each of lanes) each.reach = reach;
    return lanes;
  }

  static stretches([lane, start, length]) {
    const found = new Map();
    for (let i = 0; i < lane.length; i++) {
      if (!found.has(lane[i])) found.set(lane[i], []);
      found.get(lane[i]).push([start[i], start[i] + length[i]]);
    }
    return found;
  }

  // ------------------------------------------------------------------------------------------------ layout

  rowsOf(panel) {
    if (!this.show.folded) return panel.rows.map((row, number) => ({ number, text: `rank ${row.ranks}` }));
    const groups = new Map();
    panel.rows.forEach((row, number) => {
      const key = row.stages.join(", ");
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(number);
    });
    return [...groups].map(([stages, members]) => {
      const rest = members.length - 1;
      const name = stages === "" ? "" : `stage ${stages}, `;
      return { number: members[0], text: `${name}rank ${panel.rows[members[0]].ranks}${rest ? ` +${rest}` : ""}` };
    });
  }

  layout() {
    const narrow = this.root.clientWidth < 560;
    this.left = narrow ? 74 : 128;
    this.rowHeight = (this.show.host ? 8 : 0) + 26;
    this.lines = []; // {panel, row, text, y} with y from the top of the content
    let y = 0;
    for (const panel of this.panels) {
      this.lines.push({ panel, title: panel.title + (panel.notes.length ? ` (${panel.notes.join("; ")})` : ""), y });
      y += 24;
      for (const { number, text } of this.rowsOf(panel)) {
        this.lines.push({ panel, row: number, text, y });
        y += this.rowHeight;
      }
      y += 8;
    }
    this.memoryHeight = this.panels.some((panel) => panel.memory.length) ? 150 : 0;
    this.axisHeight = 24;
    this.contentHeight = y;
    const most = Math.max(220, Math.min(innerHeight - 120, 720)) - this.memoryHeight - this.axisHeight;
    this.rowsHeight = Math.min(y, Math.max(140, most));
    const height = this.axisHeight + this.rowsHeight + this.memoryHeight;
    this.view.style.height = `${height}px`;
    this.room.style.height = `${y + this.axisHeight + this.memoryHeight}px`;
    const scale = devicePixelRatio || 1;
    this.width = this.view.clientWidth;
    this.height = height;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(height * scale);
    this.draw();
  }

  setShown(what, value) {
    this.show[what] = value;
    this.root.querySelector(`[data-show=${what}]`).checked = value;
  }

  // ------------------------------------------------------------------------------------------------ drawing

  x(seconds) {
    return this.left + ((seconds - this.from) / (this.to - this.from)) * (this.width - this.left);
  }

  draw() {
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(this.root);
    const scale = devicePixelRatio || 1;
    this.ink = style.getPropertyValue("--ink");
    this.faint = style.getPropertyValue("--faint");
    this.paper = style.getPropertyValue("--paper");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.fillStyle = this.paper;
    pen.fillRect(0, 0, this.width, this.height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const scrolled = this.view.scrollTop;
    pen.save();
    pen.beginPath();
    pen.rect(0, this.axisHeight, this.width, this.rowsHeight);
    pen.clip();
    for (const line of this.lines) {
      const y = this.axisHeight + line.y - scrolled;
      if (y < -40 || y > this.axisHeight + this.rowsHeight) continue;
      if (line.title) this.drawTitle(pen, line.title, y);
      else this.drawRow(pen, line, y);
    }
    pen.restore();
    this.drawAxis(pen);
    if (this.memoryHeight) this.drawMemory(pen, this.axisHeight + this.rowsHeight);
    this.root.dataset.from = this.from;
    this.root.dataset.to = this.to;
  }

  drawTitle(pen, text, y) {
    pen.fillStyle = this.ink;
    pen.font = "600 13px system-ui, sans-serif";
    pen.fillText(this.fitted(pen, text, this.width - 8), 4, y + 13);
    pen.font = "11px system-ui, sans-serif";
  }

  fitted(pen, text, width) {
    if (pen.measureText(text).width <= width) return text;
    let kept = text;
    while (kept && pen.measureText(`${kept}…`).width > width) kept = kept.slice(0, -1);
    return `${kept}…`;
  }

  drawRow(pen, line, y) {
    const { panel, row } = line, unit = panel.unit_s;
    pen.fillStyle = this.ink;
    pen.fillText(this.fitted(pen, line.text, this.left - 10), 4, y + 9);
    const top = y + (this.show.host ? 8 : 0);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, y, this.width - this.left, this.rowHeight);
    pen.clip();
    pen.globalAlpha = 0.07;
    pen.fillStyle = this.ink;
    pen.fillRect(this.x(0), top, this.x(panel.length * unit) - this.x(0), 17);
    pen.globalAlpha = 1;
    if (this.show.host) this.drawLane(pen, panel, 3 * row, y + 1, 6);
    this.drawLane(pen, panel, 3 * row + 1, top, 17);
    this.drawLabels(pen, panel, 3 * row + 1, top);
    this.drawLane(pen, panel, 3 * row + 2, top + 18, 5);
    if (this.show.exposed) this.drawStretches(pen, panel.exposed.get(3 * row + 2), unit, top + 18, 5, "#8c2d04", true);
    if (this.show.critical) {
      for (const [at, up, high] of [[0, y, 7], [1, top, 17], [2, top + 17, 7]]) {
        if (at || this.show.host) this.drawStretches(pen, panel.critical.get(3 * row + at), unit, up, high, "#e0004d", false);
      }
    }
    const chosen = this.chosen;
    if (chosen && chosen.panel === panel && Math.floor(panel.lane[chosen.span] / 3) === row) {
      const [low, high] = this.edges(panel, chosen.span), at = panel.lane[chosen.span] % 3;
      pen.strokeStyle = this.ink;
      pen.lineWidth = 2.5;
      pen.strokeRect(low, [y, top, top + 17][at] + 1, Math.max(2, high - low), [6, 16, 6][at]);
    }
    pen.restore();
  }

  edges(panel, span) {
    const begin = panel.start[span] * panel.unit_s;
    return [this.x(begin), this.x(begin + panel.length_of[span] * panel.unit_s)];
  }

  drawLane(pen, panel, lane, y, height) {
    const { first, last, reach } = panel.lanes[lane], low = this.from / panel.unit_s, high = this.to / panel.unit_s;
    let span = first, until = last;
    while (span < until) { // the first whose end, or that of one before it, is in view
      const middle = (span + until) >> 1;
      if (reach[middle] < low) span = middle + 1;
      else until = middle;
    }
    let drawn = -1;
    for (; span < last && panel.start[span] <= high; span++) {
      const [left, right] = this.edges(panel, span);
      if (right < drawn + 0.5) continue; // nothing of it would be seen
      const begin = Math.max(left, drawn);
      drawn = Math.max(right, begin + 0.5);
      const kind = this.kinds[panel.names.kind[panel.name[span]]];
      pen.globalAlpha = (this.matches && !this.matches.get(panel).has(panel.name[span]) ? 0.15 : 1) * (kind === "waiting" ? 0.4 : 1);
      pen.fillStyle = this.kindColours[kind];
      pen.fillRect(begin, y, drawn - begin, height);
    }
    pen.globalAlpha = 1;
  }

  // Micro-batches stand on the longest stretch of each action, where there is room for them.
  drawLabels(pen, panel, lane, y) {
    if (!panel.actions) panel.actions = new Map();
    if (!panel.actions.has(lane)) panel.actions.set(lane, this.actionsOf(panel, lane));
    const many = panel.rows[Math.floor(lane / 3)].stages.length > 1;
    pen.textAlign = "center";
    let clear = -1;
    for (const { low, high, label } of panel.actions.get(lane)) {
      const left = Math.max(this.left, this.x(low * panel.unit_s)), right = this.x(high * panel.unit_s);
      if (right < this.left || left > this.width || right - left < 10) continue;
      const number = /^(\d+)[FBIW](\d+)/.exec(label), text = !number ? label : many ? label.split(".")[0] : number[2];
      const wide = pen.measureText(text).width, middle = (left + Math.min(right, this.width)) / 2;
      if (right - left < wide + 4 || middle - wide / 2 < clear) continue;
      clear = middle + wide / 2 + 2;
      pen.fillStyle = "#111";
      pen.fillText(text, middle, y + 9);
    }
    pen.textAlign = "start";
  }

  actionsOf(panel, lane) {
    const found = [], { first, last } = panel.lanes[lane], near = panel.length / 500;
    for (let span = first; span < last; span++) {
      const label = panel.names.id[panel.name[span]].split("/")[0];
      const low = panel.start[span], high = low + panel.length_of[span], before = found[found.length - 1];
      if (before && before.label === label && low <= before.high + near) before.high = Math.max(before.high, high);
      else found.push({ low, high, label });
    }
    return found;
  }

  drawStretches(pen, stretches, unit, y, height, colour, filled) {
    if (!stretches) return;
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = 1.5;
    let drawn = -1;
    for (const [low, high] of stretches) {
      const left = this.x(low * unit), right = this.x(high * unit);
      if (right < this.left || left > this.width || right < drawn + 0.5) continue;
      drawn = Math.max(right, left + 1);
      if (filled) pen.fillRect(left, y, drawn - left, height);
      else pen.fillRect(left, y + height - 2.5, drawn - left, 2.5);
    }
  }

  drawAxis(pen) {
    pen.fillStyle = this.paper;
    pen.fillRect(0, 0, this.width, this.axisHeight);
    const [unit, name] = LiveTimeline.timeUnit(this.to - this.from);
    pen.fillStyle = this.ink;
    pen.strokeStyle = this.faint;
    pen.fillText(name, 4, 12);
    const room = this.width - this.left, step = LiveTimeline.niceStep((this.to - this.from) / unit, room / 80);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    pen.textAlign = "center";
    this.ticks = [];
    for (let tick = Math.ceil(this.from / unit / step) * step; tick * unit <= this.to; tick += step) {
      const x = this.x(tick * unit), text = (Math.abs(tick) < step / 2 ? 0 : tick).toFixed(digits);
      pen.beginPath();
      pen.moveTo(x, this.axisHeight - 5);
      pen.lineTo(x, this.height);
      pen.stroke();
      const half = pen.measureText(text).width / 2;
      if (x - half > this.left - 20 && x + half < this.width) pen.fillText(text, x, 10);
      this.ticks.push(text);
    }
    pen.textAlign = "start";
  }

  static niceStep(length, count) {
    const power = 10 ** Math.floor(Math.log10(length / Math.max(1, count)));
    return [1, 2, 5, 10].map((each) => each * power).find((each) => length / each <= count) || 10 * power;
  }

  static timeUnit(seconds) {
    return [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]].find(([size]) => seconds >= size) || [1e-9, "ns"];
  }

  shownMemory() {
    if (this.memoryOf) return this.memoryOf;
    let best = null;
    for (const panel of this.panels) {
      for (const memory of panel.memory) if (!best || memory.peak > best.memory.peak) best = { panel, memory };
      if (best) return best;
    }
    return best;
  }

  drawMemory(pen, top) {
    const { panel, memory } = this.shownMemory(), high = this.memoryHeight - 30, base = top + 22 + high;
    const limit = this.limit && this.limit < 3 * memory.peak ? this.limit : 0;
    const most = 1.06 * Math.max(memory.peak, limit), unit = panel.unit_s;
    pen.fillStyle = this.paper;
    pen.fillRect(0, top, this.width, this.memoryHeight);
    const far = this.limit && !limit ? `, ${((100 * memory.peak) / this.limit).toPrecision(2)} % of ${LiveTimeline.bytes(this.limit)}` : "";
    const title = `memory of rank ${panel.rows[memory.row].rank}, ${panel.kind}: peak ${LiveTimeline.bytes(memory.peak)}${far}`;
    this.drawTitle(pen, title, top);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, top + 22, this.width - this.left, high);
    pen.clip();
    const height = (size) => (size / most) * high, count = memory.times.length;
    const below = new Float64Array(count);
    memory.roles.forEach((role, number) => {
      const sizes = memory.sizes[number];
      pen.fillStyle = this.roleColours[role] || "#99a1ab";
      pen.beginPath();
      for (let i = 0; i < count; i++) {
        const left = this.x(memory.times[i] * unit), right = this.x((i + 1 < count ? memory.times[i + 1] : panel.length) * unit);
        const up = base - height(below[i] + sizes[i]);
        pen.lineTo(left, up);
        pen.lineTo(right, up);
      }
      for (let i = count - 1; i >= 0; i--) {
        const left = this.x(memory.times[i] * unit), right = this.x((i + 1 < count ? memory.times[i + 1] : panel.length) * unit);
        pen.lineTo(right, base - height(below[i]));
        pen.lineTo(left, base - height(below[i]));
        below[i] += sizes[i];
      }
      pen.fill();
    });
    pen.strokeStyle = "#d55e00";
    pen.lineWidth = 1.5;
    if (limit) pen.strokeRect(this.left - 5, base - height(limit), this.width + 10, 0);
    pen.restore();
    pen.fillStyle = this.ink;
    const step = LiveTimeline.niceStep(most, 4);
    for (let size = 0; size <= most; size += step) pen.fillText(LiveTimeline.bytes(size), 4, Math.max(base - height(size) - 3, top + 28));
    if (limit) {
      pen.textAlign = "end";
      pen.fillText(`limit ${LiveTimeline.bytes(limit)}`, this.width - 4, base - height(limit) + 8);
      pen.textAlign = "start";
    }
  }

  static bytes(size) {
    const [unit, name] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([each]) => size >= each) || [1, "B"];
    return `${Number((size / unit).toPrecision(3))} ${name}`;
  }

  static seconds(length) {
    const [unit, name] = LiveTimeline.timeUnit(length);
    return `${Number((length / unit).toPrecision(4))} ${name}`;
  }

  legend() {
    const used = new Set(this.panels.flatMap((panel) => panel.names.kind)), list = this.root.querySelector(".legend");
    const add = (text, colour) => {
      const item = document.createElement("li"), box = document.createElement("span");
      box.style.background = colour;
      item.append(box, text);
      list.append(item);
    };
    this.kinds.forEach((kind, number) => { if (used.has(number) && kind !== "waiting") add(kind, this.kindColours[kind]); });
    add("exposed communication", "#8c2d04");
    add("critical path (underlined)", "#e0004d");
    const roles = new Set(this.panels.flatMap((panel) => panel.memory.flatMap((memory) => memory.roles)));
    for (const role of roles) if (role !== "live") add(`memory: ${role}`, this.roleColours[role] || "#99a1ab");
  }

  // ------------------------------------------------------------------------------------------------ choosing

  choose(panel, span) {
    this.chosen = span === null ? null : { panel, span };
    this.details.replaceChildren();
    if (span === null) return this.draw();
    const row = Math.floor(panel.lane[span] / 3), memory = panel.memory.find((each) => this.sharesStages(panel, each.row, row));
    if (memory) this.memoryOf = { panel, memory };
    for (const [name, value] of this.facts(panel, span, memory)) {
      const term = document.createElement("dt"), description = document.createElement("dd");
      term.textContent = name;
      description.append(value);
      this.details.append(term, description);
    }
    this.draw();
  }

  sharesStages(panel, a, b) {
    return panel.rows[a].stages.join() === panel.rows[b].stages.join();
  }

  facts(panel, span, memory) {
    const names = panel.names, name = panel.name[span], lane = panel.lane[span], row = panel.rows[Math.floor(lane / 3)];
    const begin = panel.start[span], end = begin + panel.length_of[span], unit = panel.unit_s;
    const found = [["instruction", names.id[name]], ["call", names.call[name]]];
    const add = (title, value) => { if (value) found.push([title, value]); };
    if (names.operator) {
      add("operator", names.operator[name]);
      add("operands", names.shapes[name]);
      add("arithmetic", names.flops[name] && `${Number((names.flops[name] / 1e9).toPrecision(3))} GFLOP`);
      add("message", names.bytes[name] && LiveTimeline.bytes(names.bytes[name]) + (names.axes[name] && ` over ${names.axes[name]}`));
    }
    add("on", `rank ${row.ranks}${row.stages.length ? `, stage ${row.stages.join(", ")}` : ""}, ${["host", "compute stream", "communication"][lane % 3]}`);
    const share = ((100 * (end - begin)) / panel.length).toPrecision(2);
    add("takes", `${LiveTimeline.seconds((end - begin) * unit)} from ${LiveTimeline.seconds(begin * unit)}, ${share} % of the step (${panel.kind})`);
    for (const other of this.panels) {
      const same = other === panel ? -1 : this.sameSpan(panel, span, other);
      if (same >= 0) add(other.kind, this.link(other, same, LiveTimeline.seconds(other.length_of[same] * other.unit_s)));
    }
    const before = panel.cause[span] ? span - panel.cause[span] : -1;
    if (before >= 0) {
      const on = panel.rows[Math.floor(panel.lane[before] / 3)];
      add("waited for", this.link(panel, before, `${names.id[panel.name[before]]} on rank ${on.rank}`));
    }
    const touches = (stretches) => (stretches.get(lane) || []).reduce((sum, [low, high]) => sum + Math.max(0, Math.min(high, end) - Math.max(low, begin)), 0);
    const critical = touches(panel.critical), exposed = lane % 3 === 2 ? touches(panel.exposed) : 0;
    add("critical path", critical && `${LiveTimeline.seconds(critical * unit)} of it`);
    add("exposed", exposed && LiveTimeline.seconds(exposed * unit));
    if (memory) {
      let at = memory.times.length - 1;
      while (at > 0 && memory.times[at] > begin) at--;
      const size = memory.sizes.reduce((sum, sizes) => sum + sizes[at], 0);
      add("memory then", `${LiveTimeline.bytes(size)} on rank ${panel.rows[memory.row].rank}`);
    }
    return found;
  }

  sameSpan(panel, span, other) {
    const id = panel.names.id[panel.name[span]], stream = panel.lane[span] % 3;
    const rank = panel.rows[Math.floor(panel.lane[span] / 3)].rank;
    const row = other.rows.findIndex((each) => each.rank === rank), lane = row < 0 ? null : other.lanes[3 * row + stream];
    for (let at = lane ? lane.first : 0; lane && at < lane.last; at++) if (other.names.id[other.name[at]] === id) return at;
    return -1;
  }

  link(panel, span, text) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => this.goTo(panel, span));
    return button;
  }

  goTo(panel, span) {
    const row = Math.floor(panel.lane[span] / 3), unit = panel.unit_s;
    if (panel.lane[span] % 3 === 0 && !this.show.host) this.setShown("host", true);
    if (this.show.folded && !this.rowsOf(panel).some((each) => each.number === row)) this.setShown("folded", false);
    const begin = panel.start[span] * unit, length = panel.length_of[span] * unit, wide = this.to - this.from;
    if (begin < this.from || begin + length > this.to || length < wide / 400) {
      const room = Math.min(wide, Math.max(60 * length, this.longest / 1e4));
      this.setRange(begin + length / 2 - room / 2, begin + length / 2 + room / 2);
    }
    this.layout();
    const line = this.lines.find((each) => each.panel === panel && each.row === row);
    if (line && (line.y < this.view.scrollTop || line.y + 30 > this.view.scrollTop + this.rowsHeight)) this.view.scrollTop = line.y - 40;
    this.choose(panel, span);
  }

  at(x, y) {
    if (y < this.axisHeight || y > this.axisHeight + this.rowsHeight || x < this.left) return null;
    const from = y - this.axisHeight + this.view.scrollTop;
    const line = this.lines.find((each) => !each.title && from >= each.y && from < each.y + this.rowHeight);
    if (!line) return null;
    const inside = from - line.y - (this.show.host ? 8 : 0), stream = inside < 0 ? 0 : inside < 17.5 ? 1 : 2;
    const { panel } = line, { first, last } = panel.lanes[3 * line.row + stream];
    const time = (this.from + ((x - this.left) / (this.width - this.left)) * (this.to - this.from)) / panel.unit_s;
    const slack = (2 * (this.to - this.from)) / (this.width - this.left) / panel.unit_s;
    let best = null, least = slack;
    for (let span = first; span < last && panel.start[span] <= time + slack; span++) {
      const away = Math.max(panel.start[span] - time, time - panel.start[span] - panel.length_of[span], 0);
      if (away <= least) [best, least] = [span, away];
    }
    return best === null ? null : { panel, span: best };
  }

  search(text) {
    const wanted = text.trim().toLowerCase();
    this.matches = wanted ? new Map() : null;
    this.hits = [];
    for (const panel of this.panels) {
      if (!wanted) break;
      const { id, call, operator } = panel.names, names = new Set();
      id.forEach((each, number) => {
        if (`${each} ${call[number]} ${operator ? operator[number] : ""}`.toLowerCase().includes(wanted)) names.add(number);
      });
      this.matches.set(panel, names);
      panel.name.forEach((name, span) => {
        if (names.has(name) && (this.show.host || panel.lane[span] % 3)) this.hits.push({ panel, span });
      });
    }
    this.next = 0;
    this.found.textContent = wanted ? `${this.hits.length.toLocaleString("en")} spans` : "";
    this.draw();
  }

  findNext() {
    if (!this.hits || !this.hits.length) return;
    const { panel, span } = this.hits[this.next % this.hits.length];
    this.next += 1;
    this.goTo(panel, span);
    this.found.textContent = `${((this.next - 1) % this.hits.length) + 1} of ${this.hits.length.toLocaleString("en")}`;
  }

  // ------------------------------------------------------------------------------------------------ moving

  setRange(from, to) {
    const wide = Math.min(this.longest, Math.max(to - from, this.longest * 1e-7));
    this.from = Math.max(0, Math.min(from, this.longest - wide));
    this.to = this.from + wide;
  }

  zoom(factor, x = (this.left + this.width) / 2) {
    const time = this.from + ((x - this.left) / (this.width - this.left)) * (this.to - this.from);
    this.setRange(time - (time - this.from) * factor, time + (this.to - time) * factor);
    this.draw();
  }

  pan(share) {
    const shift = share * (this.to - this.from);
    this.setRange(this.from + shift, this.to + shift);
    this.draw();
  }

  listen() {
    const canvas = this.canvas, place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    const doing = { in: () => this.zoom(0.5), out: () => this.zoom(2), all: () => { this.setRange(0, this.longest); this.draw(); }, find: () => this.findNext() };
    for (const button of this.root.querySelectorAll("[data-do]")) button.addEventListener("click", doing[button.dataset.do]);
    for (const box of this.root.querySelectorAll("[data-show]")) {
      box.addEventListener("change", () => { this.show[box.dataset.show] = box.checked; this.layout(); });
    }
    const input = this.root.querySelector("input[type=search]");
    input.addEventListener("input", () => this.search(input.value));
    input.addEventListener("keydown", (event) => { if (event.key === "Enter") this.findNext(); });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.deltaX) return;
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY / 300), place(event)[0]);
      else this.pan(event.deltaX / (this.width - this.left));
    }, { passive: false });
    const down = new Map();
    let moved = 0;
    canvas.addEventListener("pointerdown", (event) => { down.set(event.pointerId, place(event)); moved = 0; if (event.isTrusted) canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => {
      const now = place(event);
      if (!down.has(event.pointerId)) return this.hover(now);
      const before = down.get(event.pointerId), other = [...down].find(([id]) => id !== event.pointerId);
      moved += Math.abs(now[0] - before[0]) + Math.abs(now[1] - before[1]);
      down.set(event.pointerId, now);
      if (other) this.zoom(Math.max(10, Math.abs(before[0] - other[1][0])) / Math.max(10, Math.abs(now[0] - other[1][0])), other[1][0]);
      else this.pan((before[0] - now[0]) / (this.width - this.left));
    });
    canvas.addEventListener("pointerup", (event) => {
      down.delete(event.pointerId);
      if (moved > 5) return;
      const hit = this.at(...place(event));
      this.choose(hit ? hit.panel : null, hit ? hit.span : null);
    });
    canvas.addEventListener("pointercancel", (event) => down.delete(event.pointerId));
    canvas.addEventListener("dblclick", (event) => this.zoom(0.25, place(event)[0]));
    canvas.addEventListener("keydown", (event) => {
      const keys = { ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": doing.in, "=": doing.in, "-": doing.out, n: () => this.beside(1), p: () => this.beside(-1), Escape: () => this.choose(null, null) };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    this.view.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => { if (this.view.clientWidth !== this.width) this.layout(); }).observe(this.view);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    matchMedia("print").addEventListener("change", () => this.draw());
  }

  beside(way) {
    const { panel, span } = this.chosen || { panel: this.panels[0], span: this.panels[0].lanes[1].first - way };
    const next = span + way;
    if (next >= 0 && next < panel.lane.length) this.goTo(panel, next);
  }

  hover(place) {
    const hit = this.at(...place);
    this.canvas.title = hit ? `${hit.panel.names.id[hit.panel.name[hit.span]]}: ${LiveTimeline.seconds(hit.panel.length_of[hit.span] * hit.panel.unit_s)}` : "";
    this.canvas.style.cursor = hit ? "pointer" : "grab";
  }
}
for (const root of document.querySelectorAll(".live")) {
  const timeline = new LiveTimeline(root);
  root.timeline = timeline;
  timeline.start();
}
