"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const MOST = 2.5; // sums beyond this end in a tip

  const make = (name, attributes = {}, ...children) => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const draw = (name, attributes = {}) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (name) => style(name).split(",").map(Number);

  const tip = document.getElementById("tip");
  const showTip = (event, top, ...lines) => {
    tip.replaceChildren(...lines);
    tip.hidden = false;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(room, event.clientX + 14))}px`;
    tip.style.top = `${top + window.scrollY}px`;
  };
  const hideTip = () => { tip.hidden = true; };

  // A matrix with its sums: made once, filled as often as what it shows changes.
  const makeMap = (name) => {
    const canvas = make("canvas", { role: "img" });
    const rows = draw("svg", { preserveAspectRatio: "none", "aria-hidden": "true" });
    const columns = draw("svg", { preserveAspectRatio: "none", "aria-hidden": "true" });
    const caption = make("div", { class: "caption" });
    const node = make("div", { class: "map" }, canvas, rows, columns, caption);
    return { node, canvas, rows, columns, caption, name };
  };

  const bars = (svg, sums, across) => {
    const length = sums.length;
    svg.setAttribute("viewBox", across ? `0 0 ${length} ${MOST}` : `0 0 ${MOST} ${length}`);
    let inside = "", over = "";
    sums.forEach((sum, i) => {
      const end = Math.max(0, Math.min(sum, MOST));
      inside += across ? `M${i + 0.1} 0h.8v${end}h-.8z` : `M0 ${i + 0.1}h${end}v.8h${-end}z`;
      if (sum > MOST) over += across ? `M${i + 0.1} ${MOST - 0.3}h.8v.3h-.8z` : `M${MOST - 0.3} ${i + 0.1}h.3v.8h-.3z`;
    });
    const line = across ? { x1: 0, x2: length, y1: 1, y2: 1 } : { x1: 1, x2: 1, y1: 0, y2: length };
    svg.replaceChildren(
      draw("path", { class: across ? "sum-columns" : "sum-rows", d: inside }),
      draw("path", { class: "over", d: over }),
      draw("line", { class: "one-line", ...line }),
    );
  };

  const fillMap = (map, matrix, peak) => {
    map.matrix = matrix;
    map.peak = peak;
    const [height, width] = matrix.shape;
    const bytes = Uint8Array.from(atob(matrix.bytes), (c) => c.charCodeAt(0));
    const image = new ImageData(width, height);
    map.values = Array.from(bytes, (byte) => Math.sign(byte - 128) * ((byte - 128) / 127) ** 2 * peak);
    const [plus, minus] = [colour("--weight"), colour("--negative")];
    bytes.forEach((byte, i) => {
      const value = (byte - 128) / 127;
      const [r, g, b] = value < 0 ? minus : plus;
      image.data.set([r, g, b, Math.round(255 * Math.abs(value))], 4 * i);
    });
    map.canvas.width = width;
    map.canvas.height = height;
    map.canvas.getContext("2d").putImageData(image, 0, 0);
    bars(map.rows, matrix.rows, false);
    bars(map.columns, matrix.columns, true);
    const said = `rows ± ${matrix.off[0]}, columns ± ${matrix.off[1]}`;
    map.caption.replaceChildren(make("b", {}, matrix.head), ` ${said}`);
    map.canvas.setAttribute("aria-label", `${map.name}, ${matrix.head}: attention of ${height} queries to ${width} keys; ${said}`);
  };

  // Patches count from one, also behind a class token.
  const named = (token, count) => {
    const first = count === attention.tokens ? attention.tokens - patches : 0;
    return patches && token < first ? "class" : `${patches ? token - first + 1 : token + 1}`;
  };
  const watchMap = (map) => {
    map.canvas.addEventListener("pointermove", (event) => {
      const [height, width] = map.matrix.shape;
      const box = map.canvas.getBoundingClientRect();
      const inside = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
      const query = inside((event.clientY - box.top) / box.height, height);
      const key = inside((event.clientX - box.left) / box.width, width);
      const weights = map.values.slice(query * width, (query + 1) * width);
      showTip(event, event.clientY + 16, make("b", {}, `query ${named(query, height)} → key ${named(key, width)}`), `weight ${weights[key].toPrecision(2)}`);
      if (map.point) map.point(weights, query);
    });
    for (const name of ["pointerleave", "pointercancel"]) {
      map.canvas.addEventListener(name, () => {
        hideTip();
        if (map.leave) map.leave();
      });
    }
  };

  const radio = (group, value, checked, inside, change) => {
    const input = make("input", { type: "radio", name: group, value });
    input.checked = checked;
    input.addEventListener("change", change);
    return make("label", {}, input, inside);
  };

  const every = [];
  const single = data.attention.maps[0].every((maps) => maps.length === 1);
  const heads = (count, name) => {
    const maps = Array.from({ length: count }, () => makeMap(name));
    every.push(...maps);
    maps.forEach(watchMap);
    return [maps, make("div", { class: single ? "heads one" : "heads" }, ...maps.map((m) => m.node))];
  };

  // Attention of all models on one input.
  const attention = data.attention;
  const cards = attention.states.map((name, i) => {
    const [maps, node] = heads(attention.maps[0][i].length, name);
    const title = make("h3", {}, make("i", { class: `key c${attention.colours[i]}` }), name);
    const pair = attention.states[i + 1] === `${name}, hard`;
    document.getElementById("maps").append(make("div", { class: pair ? "card pair" : "card" }, title, node));
    return maps;
  });
  const shown = document.getElementById("shown");
  // Over the input: the query under the pointer in an outline, its keys as bright as their weights.
  const overlay = make("canvas", { id: "overlay", "aria-hidden": "true" });
  const patches = attention.side ? attention.side ** 2 : 0;
  const highlight = (weights, query) => {
    const [side, first, size] = [attention.side, attention.tokens - patches, 24];
    const context = overlay.getContext("2d");
    overlay.width = overlay.height = side * size;
    if (!weights) return;
    const most = Math.max(...weights.map(Math.abs));
    const at = (token) => [(token - first) % side * size, Math.floor((token - first) / side) * size];
    context.fillStyle = style("--key");
    weights.forEach((weight, key) => {
      if (key < first) return;
      context.globalAlpha = 0.85 * Math.abs(weight) / most;
      context.fillRect(...at(key), size, size);
    });
    if (query < first) return;
    context.globalAlpha = 1;
    context.strokeStyle = style("--query");
    context.lineWidth = 2.5;
    const [x, y] = at(query);
    context.strokeRect(x + 1.5, y + 1.5, size - 3, size - 3);
  };
  const showExample = (index) => {
    const example = attention.examples[index];
    shown.replaceChildren(overlay, example.picture
      ? make("img", { src: example.picture, alt: `${example.name}, cut into ${patches} patches` })
      : make("p", {}, example.text || example.name));
    cards.forEach((maps, i) => maps.forEach((map, h) => fillMap(map, attention.maps[index][i][h], attention.peak)));
  };
  if (attention.side) shown.style.setProperty("--side", attention.side);
  attention.examples.forEach((example, i) => {
    const inside = example.picture
      ? make("img", { src: example.picture, alt: example.name })
      : make("span", { class: "text" }, example.text || example.name);
    document.getElementById("examples").append(radio("example", i, i === 0, inside, () => showExample(i)));
  });
  cards.flat().forEach((map) => {
    map.point = (weights, query) => { if (patches && weights.length === attention.tokens) highlight(weights, query); };
    map.leave = () => { if (patches) highlight(null); };
  });
  document.getElementById("peak").textContent = attention.peak.toPrecision(2);
  showExample(0);

  // One model as its sort temperature falls.
  const softness = data.softness;
  if (softness.length) {
    const slider = document.getElementById("slider");
    const reading = Object.fromEntries(
      ["t", "accuracy", "rows", "columns"].map((key) => [key, document.getElementById(`reading-${key}`)]));
    const most = Math.max(...softness.map((run) => run.frames[0].maps.length));
    const [maps, node] = heads(most, "");
    document.getElementById("soft-maps").append(node);
    const chart = document.getElementById("soft-chart");
    let run = 0;
    const marker = draw("circle", { class: "dot", r: 6 });
    const place = sweepChart(chart, softness, marker);
    const show = () => {
      const { name, frames, colour: c } = softness[run];
      const frame = frames[slider.value];
      maps.forEach((map, h) => {
        map.node.hidden = h >= frame.maps.length;
        map.name = `${name}, ${frame.t}`;
        if (!map.node.hidden) fillMap(map, frame.maps[h], softness[run].peak);
      });
      const trained = Number(slider.value) === softness[run].trained;
      reading.t.textContent = frame.t.replace("t = ", "");
      reading.accuracy.textContent = `${frame.accuracy.toFixed(1)} %`;
      reading.rows.textContent = frame.rows;
      reading.columns.textContent = frame.columns;
      slider.setAttribute("aria-valuetext", `${frame.t}${trained ? ", where it was trained" : ""}, accuracy ${frame.accuracy.toFixed(1)} percent`);
      const [x, y] = place(run, Number(slider.value));
      marker.setAttribute("cx", x);
      marker.setAttribute("cy", y);
      marker.setAttribute("class", `dot c${c}`);
      chart.querySelectorAll(".line").forEach((line, i) => line.classList.toggle("dimmed", i !== run));
    };
    const choose = (index) => {
      run = index;
      slider.max = softness[run].frames.length - 1;
      slider.value = softness[run].trained;
      show();
    };
    softness.forEach((one, i) => {
      const inside = make("span", {}, make("i", { class: `key c${one.colour}` }), one.name);
      document.getElementById("soft-runs").append(radio("soft", i, i === 0, inside, () => choose(i)));
    });
    slider.addEventListener("input", show);
    choose(0);
  }

  // Accuracy by t, softest at the left, hard at the right end; returns where a frame is.
  function sweepChart(svg, runs, marker) {
    const W = 440, H = 230, L = 46, R = 16, T = 12, B = 34;
    const power = (frame) => (frame.t === "hard" ? null : -Math.log10(Number(frame.t.slice(4))));
    const powers = runs.flatMap((r) => r.frames.map(power)).filter((p) => p !== null);
    const [low, high] = [Math.min(...powers), Math.max(...powers)];
    const scores = runs.flatMap((r) => r.frames.map((f) => f.accuracy));
    const bottom = Math.min(...scores), top = Math.max(...scores);
    const span = Math.max(top - bottom, 1);
    const x = (p) => L + ((p === null ? high + 0.8 : p) - low) / (high + 0.8 - low) * (W - L - R);
    const y = (a) => H - B - (a - bottom + 0.04 * span) / (1.08 * span) * (H - T - B);
    const text = (content, at) => {
      const node = draw("text", { class: "tick", ...at });
      node.textContent = content;
      return node;
    };
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    const step = [1, 2, 5, 10, 20, 50].find((s) => span / s <= 5);
    for (let mark = Math.ceil(bottom / step) * step; mark <= top; mark += step) {
      svg.append(draw("line", { class: "grid", x1: L, x2: W - R, y1: y(mark), y2: y(mark) }));
      svg.append(text(mark, { x: L - 7, y: y(mark) + 4, "text-anchor": "end" }));
    }
    const digits = "⁰¹²³⁴⁵⁶⁷⁸⁹";
    for (let p = Math.ceil(low); p <= high; p++) {
      svg.append(text(p === 0 ? "1" : p === 1 ? "0.1" : `10⁻${digits[p]}`, { x: x(p), y: H - B + 17, "text-anchor": "middle" }));
    }
    svg.append(text("hard", { x: x(null), y: H - B + 17, "text-anchor": "middle" }));
    svg.append(text("sort temperature t", { x: W - R, y: H - 3, "text-anchor": "end" }));
    for (const run of runs) {
      const path = run.frames.map((f) => `${x(power(f)).toFixed(1)} ${y(f.accuracy).toFixed(1)}`);
      svg.append(draw("path", { class: `line c${run.colour}`, d: `M${path.join("L")}`, ...(run.name.endsWith("annealed") ? { "stroke-dasharray": "5 4" } : {}) }));
    }
    svg.append(marker);
    svg.setAttribute("aria-label", "Accuracy by sort temperature. " + runs.map((r) => {
      const last = r.frames[r.frames.length - 1];
      return `${r.name}: ${r.frames[r.trained].accuracy} percent at ${r.frames[r.trained].t}, ${last.accuracy} hard`;
    }).join("; "));
    return (run, frame) => [x(power(runs[run].frames[frame])), y(runs[run].frames[frame].accuracy)];
  }

  // Numbers under the pointer.
  const { width, left, right } = data.frame;
  for (const [id, series] of Object.entries(data.charts)) {
    const svg = document.getElementById(id);
    const cursor = svg.querySelector(".cursor");
    const xs = series.flatMap((one) => one.points.map((p) => p[0]));
    const [first, last] = [Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1)];
    const hide = () => {
      hideTip();
      cursor.setAttribute("visibility", "hidden");
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width * width - left) / (right - left);
      const epoch = Math.round(first + Math.max(0, Math.min(1, at)) * (last - first));
      const place = left + (epoch - first) / (last - first) * (right - left);
      cursor.setAttribute("x1", place);
      cursor.setAttribute("x2", place);
      cursor.setAttribute("visibility", "visible");
      const lines = series.flatMap((one) => one.points.filter((p) => p[0] === epoch).map((p) =>
        make("span", {}, make("span", {}, make("i", { class: `key c${one.colour}` }), one.name), make("b", {}, String(p[1])))));
      showTip(event, box.top + 8, make("b", {}, `epoch ${epoch}`), ...lines);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointercancel", hide);
  }

  const chips = [...document.querySelectorAll(".chip")];
  chips.forEach((chip) => chip.addEventListener("click", () => {
    const on = chip.getAttribute("aria-pressed") !== "true";
    chips.forEach((other) => other.setAttribute("aria-pressed", String(on && other === chip)));
    document.querySelectorAll(".charts .line, .charts .dot").forEach((mark) =>
      mark.classList.toggle("dimmed", on && !mark.classList.contains(`c${chip.dataset.colour}`)));
  }));

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    every.forEach((map) => map.matrix && fillMap(map, map.matrix, map.peak)));
})();
