// Reads what packing.py packed, draws the heat map, and shows values under the pointer.
// Texts of the run are only ever set as textContent.
(async () => {
  "use strict";

  const source = document.getElementById("data");
  if (!source) return;
  const bytes = Uint8Array.from(atob(source.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = await new Response(stream).json();

  const numberOf = (text) => Number(text.replaceAll(",", ""));
  const unpack = ({ labels, codes }) => codes.map((code) => labels[code]);

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  const tip = document.getElementById("tip");
  const showTip = (lines, x, y) => {
    tip.replaceChildren(...lines.map((line) => make("div", "", line)));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
    const top = y + 14 + height > innerHeight ? y - 14 - height : y + 14;
    tip.style.left = `${Math.max(4, Math.min(left, innerWidth - width - 4))}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  };
  const hideTip = () => { tip.hidden = true; };

  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

  // The map of some columns alone, with the worst of their cells.
  const keepColumns = (map, kept) => {
    const columns = map.columns.length;
    const pick = (values) => kept.map((column) => values[column]);
    const cells = map.stages.flatMap((_, row) => kept.map((column) => row * columns + column));
    const slice = ({ labels, codes }) => ({ labels, codes: cells.map((index) => codes[index]) });
    const [ratio, actual, expected, port] = [map.ratio, map.actual, map.expected, map.port].map(slice);
    const severities = unpack(ratio).map((text) =>
      text === null ? -1 : Number.isFinite(numberOf(text)) ? numberOf(text) : Infinity);
    const worst = severities.reduce((best, value, index) => value > severities[best] ? index : best, 0);
    const affected = kept.indexOf(map.affected);
    return {
      ...map, ratio, actual, expected, port, worst, affected: affected < 0 ? null : affected,
      columns: pick(map.columns), prompts: pick(map.prompts), tokens: pick(map.tokens),
    };
  };

  let drawn = new AbortController();  // ends the listeners of the last drawing
  function drawHeatMap(map) {
    drawn.abort();
    drawn = new AbortController();
    const { signal } = drawn;
    const host = document.getElementById("heat-map");
    const rows = map.stages.length;
    const columns = map.columns.length;
    const [ratio, actual, expected, ports] =
      [map.ratio, map.actual, map.expected, map.port].map(unpack);
    const top = Math.log10(map.top);
    const rowHeight = rows <= 60 ? 17 : 13;

    const corner = make("div", "corner", "module");
    const prompts = make("div", "prompts");
    const labels = make("div", "labels");
    const cells = make("div", "cells");
    const canvas = make("canvas");
    const worst = make("div", "box");
    const cursor = make("div", "box cursor");
    worst.id = "worst-cell";
    cursor.hidden = true;
    canvas.width = columns;
    canvas.height = rows;
    const grid = make("div", "map");
    map.stages.forEach((name, row) => {
      const label = make("div", row === map.located ? "located" : "");
      label.append(make("bdi", "", name));
      label.title = name;
      label.style.cssText = `height:${rowHeight}px;line-height:${rowHeight}px`;
      labels.append(label);
    });
    const starts = map.prompts.flatMap((prompt, column) =>
      column === 0 || map.prompts[column - 1] !== prompt ? [column] : []);
    const headings = starts.map(() => make("span"));
    const edges = starts.slice(1).map(() => make("div", "edge"));
    prompts.append(...headings);
    cells.append(canvas, ...edges, worst, cursor);
    grid.append(corner, prompts, labels, cells);
    host.replaceChildren(grid);

    const colours = () => {
      const style = getComputedStyle(document.documentElement);
      const parse = (text) => [1, 3, 5].map((at) => parseInt(text.trim().slice(at, at + 2), 16));
      const stops = style.getPropertyValue("--ramp").split(",").map(parse);
      return { stops, nonfinite: parse(style.getPropertyValue("--nonfinite")) };
    };
    const paint = () => {
      const { stops, nonfinite } = colours();
      const context = canvas.getContext("2d");
      const image = context.createImageData(columns, rows);
      const colourOf = (text) => {
        if (text === null) return [0, 0, 0, 0];
        if (!Number.isFinite(numberOf(text))) return [...nonfinite, 255];
        const place = clamp(Math.log10(numberOf(text)) / top, 0, 1) * (stops.length - 1);
        const low = Math.min(Math.floor(place), stops.length - 2);
        const mixed = stops[low].map((value, channel) =>
          value + (stops[low + 1][channel] - value) * (place - low));
        return [...mixed, 255];
      };
      const ofLabel = map.ratio.labels.map(colourOf);
      map.ratio.codes.forEach((code, index) => image.data.set(ofLabel[code], 4 * index));
      context.putImageData(image, 0, 0);
    };

    let width = 0;
    const place = (box, index) => {
      const [row, column] = [Math.floor(index / columns), index % columns];
      box.style.cssText = `left:${column * width}px;top:${row * rowHeight}px;` +
        `width:${width}px;height:${rowHeight}px`;
    };
    const arrange = () => {
      const room = host.clientWidth;
      const longest = Math.max(...map.stages.map((name) => name.length)) * 6.8 + 20;
      const labelWidth = Math.round(Math.min(longest, room * 0.42));
      width = clamp((room - labelWidth - 1) / columns, 4, 30);
      grid.style.setProperty("--labels", `${labelWidth}px`);
      cells.style.cssText = `width:${width * columns}px;height:${rowHeight * rows}px`;
      starts.forEach((start, number) => {
        const end = starts[number + 1] ?? columns;
        const span = (end - start) * width;
        const [first, last] = [map.tokens[start][0], map.tokens[end - 1][1]];
        const tokens = `prompt ${map.prompts[start]}, tokens ${first} to ${last}`;
        const short = span > 70 ? `prompt ${map.prompts[start]}` : map.prompts[start];
        headings[number].replaceChildren(make("b", "", span > 180 ? tokens : short));
        headings[number].title = tokens;
        headings[number].style.width = `${span}px`;
        if (number) edges[number - 1].style.left = `${start * width}px`;
      });
      prompts.style.width = `${width * columns}px`;
      place(worst, map.worst);
    };

    const describe = (index) => {
      const lines = [map.stages[Math.floor(index / columns)], map.columns[index % columns]];
      if (ratio[index] === null) return [...lines, "not compared"];
      const isFinite = Number.isFinite(numberOf(ratio[index]));
      return [
        ...lines,
        isFinite ? `${ratio[index]}x the noise of this row` : "not finite",
        `${map.judgedSide} ${actual[index]}, noise ${expected[index]}`,
        ports[index],
      ];
    };
    let current = map.worst;
    const point = (index, x, y) => {
      current = index;
      place(cursor, index);
      cursor.hidden = false;
      showTip(describe(index), x, y);
    };
    cells.addEventListener("pointermove", (event) => {
      const box = cells.getBoundingClientRect();
      const column = clamp(Math.floor((event.clientX - box.left) / width), 0, columns - 1);
      const row = clamp(Math.floor((event.clientY - box.top) / rowHeight), 0, rows - 1);
      point(row * columns + column, event.clientX, event.clientY);
    });
    const leave = () => { cursor.hidden = true; hideTip(); };
    cells.addEventListener("pointerleave", leave);
    host.addEventListener("blur", leave, { signal });
    host.addEventListener("keydown", (event) => {
      const step = ARROWS[event.key];
      if (!step) return;
      event.preventDefault();
      const column = clamp((current % columns) + step[0], 0, columns - 1);
      const row = clamp(Math.floor(current / columns) + step[1], 0, rows - 1);
      place(cursor, row * columns + column);
      cursor.hidden = false;
      cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
      const box = cursor.getBoundingClientRect();
      point(row * columns + column, box.right, box.bottom);
    }, { signal });

    const ticks = document.querySelector(".legend-bar .ticks");
    ticks.replaceChildren();
    for (const mark of [1, 3, 10, 30, 100, 1e3, 1e4, 1e5, 1e6, 1e8]) {
      if (mark > map.top * 1.001) break;
      const tick = make("span", "", `${mark.toLocaleString("en")}x`);
      tick.style.left = `${(100 * Math.log10(mark)) / top}%`;
      ticks.append(tick);
    }
    paint();
    arrange();
    if (map.located !== null) {
      host.scrollTop = map.located * rowHeight - host.clientHeight / 2;
      host.scrollLeft = (map.affected ?? map.worst % columns) * width - host.clientWidth / 2;
    }
    const resized = new ResizeObserver(arrange);
    resized.observe(host);
    signal.addEventListener("abort", () => resized.disconnect());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint, { signal });
  }

  function watchChart(figure, points) {
    const plot = figure.querySelector(".plot");
    const guide = plot.querySelector(".guide");
    let current = -1;
    const point = (index, x, y) => {
      current = index;
      guide.style.left = `${points[index][0] / 10}%`;
      guide.hidden = false;
      showTip(points[index][1], x, y);
    };
    const leave = () => { guide.hidden = true; hideTip(); };
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      point(clamp(Math.floor(share * points.length), 0, points.length - 1), event.clientX, event.clientY);
    });
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      const step = ARROWS[event.key];
      if (!step || !step[0]) return;
      event.preventDefault();
      const index = clamp(current + step[0], 0, points.length - 1);
      const box = plot.getBoundingClientRect();
      point(index, box.left + (box.width * points[index][0]) / 1000, box.top + 20);
    });
  }

  const ROW_HEIGHT = 27;
  const OVERSCAN = 12;
  const WIDTHS = { module: 300, port: 130, statistic: 130, level: 80 };

  function drawTable(packed) {
    const host = document.getElementById("table");
    const filter = document.getElementById("filter");
    const columns = packed.columns.map(({ title, labels, codes, isNumeric }) => ({
      title,
      codes,
      isNumeric,
      texts: labels.map((label) => String(label ?? "")),
      searched: !isNumeric && labels.map((label) => label.toLowerCase()),
    }));
    let order = Uint32Array.from({ length: packed.count }, (_, row) => row);
    const all = order;
    let sorted = { column: null, sign: 1 };

    const table = make("table");
    const groups = make("colgroup");
    const head = make("tr");
    const body = make("tbody");
    columns.forEach((column) => {
      const group = make("col");
      group.style.width = `${WIDTHS[column.title] ?? (column.isNumeric ? 84 : 90)}px`;
      groups.append(group);
      const cell = make("th", column.isNumeric ? "number" : "");
      cell.scope = "col";
      const button = make("button", "", column.title);
      button.addEventListener("click", () => {
        const again = sorted.column === column;
        sorted = { column, sign: again ? -sorted.sign : column.isNumeric ? -1 : 1 };
        head.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
        cell.setAttribute("aria-sort", sorted.sign < 0 ? "descending" : "ascending");
        columns.forEach((other, number) => {
          const arrow = other === column ? (sorted.sign < 0 ? " ↓" : " ↑") : "";
          head.children[number].firstChild.textContent = other.title + arrow;
        });
        choose();
      });
      cell.append(button);
      head.append(cell);
    });
    const heading = make("thead");
    heading.append(head);
    table.append(groups, heading, body);
    host.append(table);

    const spacer = (height) => {
      const row = make("tr", "spacer");
      const cell = make("td");
      cell.colSpan = columns.length;
      cell.style.height = `${height}px`;
      row.append(cell);
      return row;
    };
    const show = () => {
      const first = Math.max(0, Math.floor(host.scrollTop / ROW_HEIGHT) - OVERSCAN);
      const count = Math.ceil(host.clientHeight / ROW_HEIGHT) + 2 * OVERSCAN;
      const last = Math.min(order.length, first + count);
      const shown = [];
      for (let place = first; place < last; place += 1) {
        const row = make("tr");
        for (const column of columns) {
          const cell = make("td", column.isNumeric ? "number" : "", column.texts[column.codes[order[place]]]);
          if (column.searched) cell.title = cell.textContent;
          row.append(cell);
        }
        shown.push(row);
      }
      body.replaceChildren(
        spacer(first * ROW_HEIGHT), ...shown, spacer((order.length - last) * ROW_HEIGHT));
    };
    const choose = () => {
      const wanted = filter.value.trim().toLowerCase();
      const hits = columns.filter((column) => wanted && column.searched).map((column) =>
        [column.codes, column.searched.map((label) => label.includes(wanted))]);
      order = all.filter((row) => !wanted || hits.some(([codes, isHit]) => isHit[codes[row]]));
      const { column, sign } = sorted;
      if (column) {
        const { codes } = column;  // labels are sorted
        order.sort((one, other) => sign * (codes[one] - codes[other]) || one - other);
      }
      const counted = order.length.toLocaleString("en");
      document.getElementById("filter-count").textContent = `${counted} rows`;
      host.scrollTop = 0;
      show();
    };
    let waiting = false;
    host.addEventListener("scroll", () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; show(); });
    });
    filter.addEventListener("input", choose);
    choose();
  }

  if (data.heatMap) {
    const map = data.heatMap;
    drawHeatMap(map);
    const decoded = [...map.steps.keys()].filter((column) => map.steps[column] > 0);
    document.getElementById("decode-only")?.addEventListener("change", (event) =>
      drawHeatMap(event.target.checked ? keepColumns(map, decoded) : map));
  }
  document.querySelectorAll("[data-chart]").forEach((figure) =>
    watchChart(figure, data.charts[figure.dataset.chart]));
  if (data.table.count) drawTable(data.table);
  document.getElementById("to-rows")?.addEventListener("click", (event) => {
    const filter = document.getElementById("filter");
    filter.value = event.target.dataset.filter;
    filter.dispatchEvent(new Event("input"));
    document.getElementById("measurements").scrollIntoView();
  });
  document.documentElement.dataset.drawn = "yes";
})();
