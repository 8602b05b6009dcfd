// Drawings of the page. Words reach the page as text nodes and canvas text only, never as HTML.

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element[name] = value;
    else if (name === "class") element.className = value;
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const shown = (word) => word.replaceAll(" ", "·").replaceAll("\n", "⏎");
const short = (word, most = 12) => {
  const letters = Array.from(shown(word));
  return letters.length <= most ? letters.join("") : letters.slice(0, most - 1).join("") + "…";
};
const percent = (p) => (100 * p).toFixed(1) + " %";
const signed = (value, digits = 2) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
const plain = (value, digits = 2) => (value < 0 ? "−" : "") + Math.abs(value).toFixed(digits);

// Colours: one hue, from the paper to its opposite; the square root makes weights of a few per cent visible.

const STOPS = {
  light: [
    [247, 250, 253],
    [198, 219, 239],
    [107, 174, 214],
    [33, 113, 181],
    [8, 48, 107],
  ],
  dark: [
    [22, 29, 37],
    [24, 58, 98],
    [37, 105, 170],
    [107, 174, 230],
    [226, 241, 255],
  ],
};
let palette = { css: {}, table: [] };

function usePalette(theme) {
  const stops = STOPS[theme],
    style = getComputedStyle(document.documentElement);
  const rgb = Array.from({ length: 256 }, (_, k) => {
    const place = (k / 255) * (stops.length - 1),
      at = Math.min(stops.length - 2, Math.floor(place));
    return stops[at].map((from, c) => Math.round(from + (place - at) * (stops[at + 1][c] - from)));
  });
  const css = Object.fromEntries(
    ["ink", "soft", "line", "paper", "accent", "blue", "masked", "hatch"].map((name) => [
      name,
      style.getPropertyValue("--" + name).trim(),
    ]),
  );
  palette = { rgb, css, table: rgb.map((own) => `rgb(${own})`), dark: theme === "dark" };
}

const level = (weight) => Math.round(255 * Math.sqrt(clamp(weight, 0, 1)));
const colourOf = (weight) => palette.table[level(weight)];
const textOn = (weight) =>
  level(weight) > 135 !== palette.dark ? "#fff" : palette.dark && level(weight) > 135 ? "#0d141b" : palette.css.ink;

// Negative numbers are orange, positive ones blue; both fade to the paper at zero.
function signedColour(value) {
  const part = Math.sqrt(Math.min(1, Math.abs(value))),
    [from] = STOPS[palette.dark ? "dark" : "light"];
  const to =
    value < 0 ? (palette.dark ? [255, 154, 92] : [184, 72, 15]) : palette.dark ? [107, 174, 230] : [33, 113, 181];
  return from.map((own, c) => Math.round(own + part * (to[c] - own)));
}

// Sharp on dense displays.
function sized(canvas, width, height) {
  const dense = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * dense);
  canvas.height = Math.round(height * dense);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(dense, dense);
  return pen;
}

let hatching = null; // masked cells: grey stripes, so that they differ from a weight of zero in any colours

function maskedFill(pen) {
  if (!hatching || hatching.dark !== palette.dark) {
    const tile = document.createElement("canvas"),
      own = tile.getContext("2d");
    tile.width = tile.height = 6;
    own.fillStyle = palette.css.masked;
    own.fillRect(0, 0, 6, 6);
    own.strokeStyle = palette.css.hatch;
    own.beginPath();
    for (const at of [-6, 0, 6]) {
      own.moveTo(at, 6);
      own.lineTo(at + 6, 0);
    }
    own.stroke();
    hatching = { tile, dark: palette.dark };
  }
  return pen.createPattern(hatching.tile, "repeat");
}

// A map: rows are queries, columns are keys. Returns where its cells are.
function drawMap(canvas, { weights, mask, T, S, n, queries, keys, query, key, width }) {
  const measure = canvas.getContext("2d"),
    font = "system-ui, sans-serif";
  measure.font = `13px ${font}`;
  const wide = (words) => Math.ceil(Math.max(...words.map((word) => measure.measureText(short(word)).width))) + 9;
  const left = wide(queries),
    top = wide(keys),
    most = Math.max(T, S);
  const cell = clamp(Math.floor((width - left - 3) / most), Math.ceil(Math.max(7, 220 / most)), 54),
    size = clamp(cell - 2, 9, 13);
  const pen = sized(canvas, left + S * cell + 3, top + T * cell + 3);
  const at = (i, j) => weights[(n * T + i) * S + j],
    stripes = maskedFill(pen),
    numbers = cell >= 27;
  for (let i = 0; i < T; i++)
    for (let j = 0; j < S; j++) {
      const hidden = mask && !mask[i * S + j],
        weight = at(i, j);
      pen.fillStyle = hidden ? stripes : colourOf(weight);
      pen.fillRect(left + j * cell, top + i * cell, cell, cell);
      if (numbers && !hidden && weight >= 0.005) {
        pen.fillStyle = textOn(weight);
        pen.font = `${cell >= 36 ? 11 : 9.5}px ${font}`;
        pen.textAlign = "center";
        pen.textBaseline = "middle";
        pen.fillText(
          weight >= 0.995 ? "1" : weight.toFixed(2).slice(1),
          left + (j + 0.5) * cell,
          top + (i + 0.5) * cell + 0.5,
        );
      }
    }
  pen.strokeStyle = palette.css.line;
  pen.strokeRect(left + 0.5, top + 0.5, S * cell - 1, T * cell - 1);
  const every = Math.ceil((size + 1) / cell);
  pen.font = `${size}px ${font}`;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  queries.forEach((word, i) => {
    if (i % every && i !== query) return;
    pen.fillStyle = i === query ? palette.css.accent : palette.css.ink;
    pen.fillText(short(word), left - 5, top + (i + 0.5) * cell);
  });
  pen.textAlign = "left";
  keys.forEach((word, j) => {
    if (j % every && j !== key) return;
    pen.fillStyle = j === key ? palette.css.accent : palette.css.ink;
    pen.save();
    pen.translate(left + (j + 0.5) * cell, top - 5);
    pen.rotate(-Math.PI / 2);
    pen.fillText(short(word), 0, 0);
    pen.restore();
  });
  pen.strokeStyle = palette.css.accent;
  pen.lineWidth = 2;
  if (query !== null) pen.strokeRect(left + 1, top + query * cell + 1, S * cell - 2, cell - 2);
  if (query !== null && key !== null)
    pen.strokeRect(left + key * cell + 1, top + query * cell + 1, cell - 2, cell - 2);
  return { left, top, cell };
}

// A small map, one pixel for each cell; the style enlarges it.
function drawTile(canvas, { weights, mask, T, S, n }) {
  canvas.width = S;
  canvas.height = T;
  const pen = canvas.getContext("2d"),
    image = pen.createImageData(S, T),
    grey = palette.dark ? [44, 51, 58] : [228, 228, 225];
  for (let k = 0; k < T * S; k++)
    image.data.set([...(mask && !mask[k] ? grey : palette.rgb[level(weights[n * T * S + k])]), 255], 4 * k);
  pen.putImageData(image, 0, 0);
}

// Lines from the queries on the left to the keys on the right; their width and opacity is the weight.
function drawLines(canvas, { weights, T, S, n, queries, keys, query, key, width, top, cell }) {
  const row = Math.max(cell, 15),
    size = clamp(row - 3, 10, 13);
  const pen = sized(canvas, width, top + Math.max(T, S) * row + 4),
    from = width * 0.34,
    to = width * 0.66;
  const y = (k) => top + (k + 0.5) * row;
  pen.font = `${size}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  for (let i = 0; i < T; i++)
    for (let j = 0; j < S; j++) {
      const weight = weights[(n * T + i) * S + j],
        on = i === query;
      if (weight < (on ? 0.01 : 0.06)) continue;
      pen.globalAlpha = on ? clamp(0.25 + weight, 0, 1) : 0.1 + 0.4 * weight;
      pen.strokeStyle = on ? palette.css.accent : palette.css.blue;
      pen.lineWidth = on ? 1 + 4 * weight : 1.2;
      pen.beginPath();
      pen.moveTo(from + 4, y(i));
      pen.lineTo(to - 4, y(j));
      pen.stroke();
    }
  pen.globalAlpha = 1;
  pen.textAlign = "right";
  queries.forEach((word, i) => {
    pen.fillStyle = i === query ? palette.css.accent : palette.css.ink;
    pen.fillText(short(word), from, y(i), from - 2);
  });
  pen.textAlign = "left";
  keys.forEach((word, j) => {
    pen.fillStyle = j === key ? palette.css.accent : palette.css.ink;
    pen.fillText(short(word), to, y(j), width - to - 2);
  });
  return { row, top };
}

// A vector as a strip of H colours, relative to the largest number `most`.
function drawVector(canvas, values, most) {
  canvas.width = values.length;
  canvas.height = 1;
  canvas.style.width = clamp(Math.round(112 / values.length), 2, 9) * values.length + "px";
  const pen = canvas.getContext("2d"),
    image = pen.createImageData(values.length, 1);
  values.forEach((value, k) => image.data.set([...signedColour(most ? value / most : 0), 255], 4 * k));
  pen.putImageData(image, 0, 0);
  return canvas;
}

const largest = (vectors) => Math.max(...vectors.flatMap((own) => Array.from(own, Math.abs)), 1e-9);
const strip = (values, most) =>
  drawVector(el("canvas", { class: "vector", "aria-hidden": "true" }), Array.from(values), most);

// What a bias subtracts from the score at each distance: a line for each head, dashed as trained. The scale is four
// times the range as trained, so that the lines move and not the scale. Returns its limits.
function drawBias(canvas, { now, trained, head, T, width }) {
  const height = 96,
    pen = sized(canvas, width, height),
    left = 34,
    bottom = height - 17;
  const values = trained.flat(),
    low = 4 * Math.min(0, ...values),
    high = Math.max(0, 4 * Math.max(...values), low + 1e-6);
  const x = (d) => left + (d / Math.max(1, T - 1)) * (width - left - 4),
    y = (value) => 6 + ((high - value) / (high - low)) * (bottom - 10);
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = palette.css.soft;
  pen.strokeStyle = palette.css.line;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const value of [high, low]) {
    pen.beginPath();
    pen.moveTo(left, y(value));
    pen.lineTo(width, y(value));
    pen.stroke();
    pen.fillText(plain(value, Math.abs(high - low) < 10 ? 1 : 0), left - 5, y(value));
  }
  pen.textBaseline = "bottom";
  pen.textAlign = "left";
  pen.fillText("distance 0", left, height);
  pen.textAlign = "right";
  pen.fillText(String(T - 1), width - 2, height);
  pen.beginPath();
  pen.rect(left, 0, width - left, bottom);
  pen.clip();
  const curve = (own, colour, wide, dash) => {
    pen.strokeStyle = colour;
    pen.lineWidth = wide;
    pen.setLineDash(dash);
    pen.beginPath();
    own.forEach((value, d) => (d ? pen.lineTo(x(d), y(value)) : pen.moveTo(x(d), y(value))));
    pen.stroke();
  };
  trained.forEach((own) => curve(own, palette.css.soft, 1, [3, 3]));
  now.forEach((own, n) => n !== head && curve(own, palette.css.blue, 1.5, []));
  if (now[head]) curve(now[head], palette.css.accent, 2.5, []);
  return [low, high];
}

// One query through one head: q · k, / sqrt(H), + bias, mask, softmax, × v. Returns the rows of a table.
function stepsOf(layer, n, i, S) {
  const { q, k, v, H, N, T, bias, mask, weights } = layer,
    D = N * H;
  const part = (x, row) => x.subarray(row * D + n * H, row * D + (n + 1) * H),
    query = part(q, i),
    output = new Float32Array(H);
  const rows = Array.from({ length: S }, (_, j) => {
    const key = part(k, j),
      value = part(v, j),
      dot = query.reduce((sum, own, d) => sum + own * key[d], 0);
    const added = bias ? bias[(n * T + i) * S + j] : 0,
      hidden = Boolean(mask) && !mask[i * S + j],
      weight = weights[(n * T + i) * S + j];
    value.forEach((own, d) => {
      output[d] += weight * own;
    });
    return { key, value, dot, scaled: dot / Math.sqrt(H), added, hidden, score: dot / Math.sqrt(H) + added, weight };
  });
  return { query, rows, output, hasBias: Boolean(bias) };
}

function drawSteps(place, layer, n, i, { query: word, keys, key, pick }) {
  const S = keys.length,
    { query, rows, output, hasBias } = stepsOf(layer, n, i, S),
    root = Math.sqrt(layer.H);
  const most = { q: largest([query, ...rows.map((row) => row.key)]), v: largest(rows.map((row) => row.value)) };
  const heads = ["key", "k", "q · k", `÷ √${layer.H}`, "+ bias", "= score", "softmax", "", "v", "weight × v"];
  const table = el(
    "table",
    {},
    el("thead", {}, el("tr", {}, ...heads.map((title) => el("th", { scope: "col" }, title)))),
  );
  const body = el("tbody");
  rows.forEach((row, j) => {
    const track = el("span", { class: "track" }, el("i", { style: `width:${100 * row.weight}%` }));
    const weighed = Array.from(row.value, (own) => own * row.weight);
    body.append(
      el(
        "tr",
        { class: j === key ? "on" : "", onclick: () => pick(j) },
        el("td", { class: "word" }, shown(keys[j])),
        el("td", {}, strip(row.key, most.q)),
        el("td", {}, plain(row.dot)),
        el("td", {}, plain(row.scaled)),
        el("td", {}, hasBias ? plain(row.added) : "–"),
        el("td", {}, row.hidden ? "masked" : plain(row.score)),
        el("td", {}, row.hidden ? "masked" : row.weight.toFixed(3)),
        el("td", {}, track),
        el("td", {}, strip(row.value, most.v)),
        el("td", {}, strip(weighed, most.v)),
      ),
    );
  });
  table.append(body);
  place.replaceChildren(
    el(
      "p",
      { class: "soft" },
      "Query ",
      el("b", {}, shown(word)),
      ", q = ",
      strip(query, most.q),
      ` is compared with the k of each key: score = q · k ÷ √${layer.H}${hasBias ? " + positional bias" : ""}. The softmax turns scores into weights, weight = eˢᶜᵒʳᵉ ÷ Σ eˢᶜᵒʳᵉ.`,
      hasBias ? "" : " This encoding adds no bias.",
    ),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Steps of attention" }, table),
    el(
      "p",
      { class: "soft", style: "margin-top:6px" },
      "Σ weight × v = output of the head ",
      strip(output, largest([output])),
      ` Each strip has ${layer.H} numbers: blue is positive, orange negative. √${layer.H} = ${root.toFixed(2)}.`,
    ),
  );
}
