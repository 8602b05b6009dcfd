// The page: its state, what each change computes, and its controls. `engine.js` computes, `views.js` draws.

const content = JSON.parse(document.getElementById("content").textContent);
const $ = (id) => document.getElementById(id);
const tokenizers = content.tokenizers.map(makeTokenizer),
  models = new Map();
const state = {
  text: content.text,
  query: null,
  key: null,
  pinned: false,
  theme: null,
  temperature: 1,
  seed: 1,
  panels: [],
  front: 0, // the side that a phone shows
};
const view = { time: 0, opened: false, address: null, hash: "", round: 0, pointer: null, warning: null };
const hasTouch = () => isNarrow() || matchMedia("(hover: none)").matches;
const isNarrow = () => window.innerWidth <= 900;

// One model; the same one twice, as trained and changed; or two runs, which may be the same with two changes.
function viewName() {
  const [left, right] = state.panels;
  if (!right) return "one";
  return left.run === right.run && !isChanged(left) ? "changed" : "runs";
}
const mainPanel = () => state.panels[viewName() === "changed" ? 1 : 0];

const untouched = () => ({ ...UNCHANGED, heads: [] });

function newPanel(run) {
  return {
    run,
    checkpoint: content.runs[run].chosen,
    part: null,
    layer: 0,
    head: 0,
    change: untouched(),
    round: 0,
    shown: null,
    example: null, // a change that the page made by itself, as JSON
    playing: null, // while the training plays: a number that no other start has
  };
}

function modelOf(panel, checkpoint = panel.checkpoint) {
  const run = content.runs[panel.run],
    name = `${panel.run}.${checkpoint}`;
  if (!models.has(name)) models.set(name, makeModel(run.model, decodeSafetensors(run.checkpoints[checkpoint].weights)));
  return models.get(name);
}

const runOf = (panel) => content.runs[panel.run];
const taskOf = (panel) => runOf(panel).model.task;
// As trained and changed show the same step.
const coupled = (panel) => (viewName() === "changed" ? state.panels : [panel]);
const isChanged = (panel) => JSON.stringify(panel.change) !== JSON.stringify(untouched());
const pause = (milliseconds = 0) => new Promise((resolve) => setTimeout(resolve, milliseconds));

// Compute

// Tokens and ids of the sentence, as many as the run reads.
function read(panel) {
  const run = runOf(panel),
    all = tokenizers[run.tokenizer].encode(state.text);
  const pieces = all.slice(0, run.limit - (taskOf(panel) === "translate" ? 1 : 0));
  panel.left = all.length - pieces.length;
  panel.words = pieces.map((piece) => piece.word);
  panel.unknown = pieces.map((piece) => piece.id === tokenizers[run.tokenizer].unknown);
  panel.ids = pieces.map((piece) => piece.id);
  panel.empty = !pieces.length;
}

const inputsOf = (panel, written) =>
  taskOf(panel) === "translate"
    ? [
        [...panel.ids, 3],
        [2, ...written],
      ]
    : [panel.ids];

// The loss of the sentence under a change, in nats, and the probabilities that it is about.
function lossOf(panel, change, result = null) {
  const model = modelOf(panel),
    task = taskOf(panel),
    own = result ?? forward(model, inputsOf(panel, panel.reference ?? []), change);
  if (task === "classify") {
    const logits = logitsOf(model, own.states);
    return { loss: negativeLogLikelihood(logits, panel.predicted), p: softmax(logits)[panel.predicted] };
  }
  const logits = logitsOf(model, own.states);
  if (task === "lm") return { loss: nextTokenLoss(logits, panel.ids), p: null };
  const targets = [...panel.reference, 3],
    V = logits.length / targets.length;
  return {
    loss:
      targets.reduce((sum, id, t) => sum + negativeLogLikelihood(logits.subarray(t * V, (t + 1) * V), id), 0) /
      targets.length,
    p: null,
  };
}

// What shows at once: attention, and the probabilities of the classes or of the next word.
function compute(panel) {
  read(panel);
  panel.losses = panel.table = panel.effects = panel.result = null;
  if (panel.empty) return;
  const model = modelOf(panel),
    last = (result) => logitsOf(model, result.states, Math.max(0, result.states.T - 1));
  const task = taskOf(panel);
  if (task === "translate") {
    panel.written = [];
    panel.reference = [];
    panel.base = null;
    panel.result = forward(model, inputsOf(panel, []), panel.change);
    return;
  }
  panel.result = forward(model, [panel.ids], panel.change);
  const base = isChanged(panel) ? forward(model, [panel.ids]) : panel.result;
  panel.now = softmax(task === "lm" ? last(panel.result).subarray(0, runOf(panel).words) : last(panel.result));
  panel.before =
    base === panel.result
      ? panel.now
      : softmax(task === "lm" ? last(base).subarray(0, runOf(panel).words) : last(base));
  if (task === "classify") panel.predicted = reportedAnswer(panel, base);
}

// The class that the loss is about, at every step and on both sides: that of the reported checkpoint as trained.
function reportedAnswer(panel, base) {
  const { chosen } = runOf(panel),
    model = modelOf(panel, chosen),
    logits = logitsOf(model, panel.checkpoint === chosen ? base.states : forward(model, [panel.ids]).states);
  return logits.indexOf(Math.max(...logits));
}

// Greedy translation, one token after another; `show` sees each.
async function translate(panel, change, show) {
  const model = modelOf(panel),
    limit = Math.min(2 * (panel.ids.length + 1) + 10, runOf(panel).limit),
    written = [],
    round = panel.round;
  while (written.length < limit) {
    const result = forward(model, inputsOf(panel, written), change),
      logits = logitsOf(model, result.states, written.length);
    logits[0] = logits[2] = -Infinity;
    const next = written.length === limit - 1 ? 3 : logits.indexOf(Math.max(...logits));
    show(written, result);
    if (next === 3) break;
    written.push(next);
    await pause();
    if (panel.round !== round) return null;
  }
  return written;
}

// What takes longer follows a keystroke: translations, losses, the effect of each change and of each head.
async function follow(panel) {
  const round = panel.round,
    alive = () => panel.round === round && !panel.empty;
  if (panel.empty) {
    renderLater(panel);
    return;
  }
  const task = taskOf(panel),
    words = tokenizers[runOf(panel).tokenizer];
  if (task === "translate") {
    const grow = (written, result) => {
      panel.written = [...written];
      panel.result = result;
      renderMaps(panel);
      renderAnswer(panel);
    };
    const reference = await translate(panel, UNCHANGED, isChanged(panel) ? () => {} : grow);
    if (!reference) return;
    panel.reference = reference;
    panel.base = words.decode(reference);
    if (isChanged(panel) && !(await translate(panel, panel.change, grow))) return;
    renderMaps(panel);
    renderAnswer(panel);
    renderSteps(panel);
  }
  await pause(60);
  if (!alive()) return;
  const now = lossOf(panel, panel.change, task === "translate" ? null : panel.result);
  panel.losses = { now, before: isChanged(panel) ? lossOf(panel, UNCHANGED) : now };
  renderAnswer(panel);
  panel.continuation = undefined;
  if (task === "lm") await continueText(panel, alive);
  panel.effects = {};
  for (const name of ["off", "scale", "slopes", "base", "strength", "pattern"]) {
    if (JSON.stringify(panel.change[name]) === JSON.stringify(UNCHANGED[name])) continue;
    panel.effects[name] = lossOf(panel, { ...untouched(), [name]: panel.change[name] });
    await pause();
    if (!alive()) return;
  }
  renderEffects(panel);
  const table = [];
  for (const [part, layers] of Object.entries(panel.result.parts))
    for (const [l, layer] of layers.entries())
      for (let n = 0; n < layer.N; n++) {
        const name = `${part}.${l}.${n}`,
          isOff = panel.change.heads.includes(name);
        const heads = isOff ? panel.change.heads.filter((own) => own !== name) : [...panel.change.heads, name];
        const other = lossOf(panel, { ...panel.change, heads }),
          [on, off] = isOff ? [other, now] : [now, other];
        const scores = part === "cross" ? {} : headScores(layer.weights, n, layer.T, tokensOf(panel, part)[0]);
        table.push({ part, l, n, name, isOff, on, off, rise: off.loss - on.loss, scores });
        await pause();
        if (!alive()) return;
      }
  panel.table = table.sort((a, b) => (b.rise || 0) - (a.rise || 0));
  renderLater(panel);
}

// Sample what follows the text, word by word.
async function continueText(panel, alive) {
  const run = runOf(panel),
    model = modelOf(panel),
    tokenizer = tokenizers[run.tokenizer],
    random = randomNumbers(state.seed),
    ids = [...panel.ids],
    own = [];
  const room = Math.min(20, run.limit - ids.length + 1);
  for (let k = 0; k < room; k++) {
    const { states } = forward(model, [ids], panel.change);
    const logits = logitsOf(model, states, states.T - 1);
    const next = drawToken(logits, state.temperature, random, run.words, tokenizer.padding);
    if (tokenizer.ends.includes(next)) break;
    ids.push(next);
    own.push(next);
    panel.continuation = tokenizer.decode(ids).slice(tokenizer.decode(panel.ids).length);
    if (k % 4 === 3) renderAnswer(panel);
    await pause();
    if (!alive()) return;
  }
  renderAnswer(panel);
}

// Parts, tokens, selection

const partOf = (panel) =>
  panel.part && panel.result.parts[panel.part] ? panel.part : Object.keys(panel.result.parts).at(-1);

// Queries and keys of a part as text.
function tokensOf(panel, part) {
  const run = runOf(panel),
    cls = run.model.parts.encoder?.hasCls ? ["<cls>"] : [];
  if (taskOf(panel) !== "translate") {
    const own = [...cls, ...panel.words];
    return [own, own];
  }
  const word = tokenizers[run.tokenizer].text,
    source = [...panel.words, "<eos>"];
  const written = panel.written.map(word);
  if (part === "encoder") return [source, source];
  if (part === "decoder")
    return [
      ["<bos>", ...written],
      ["<bos>", ...written],
    ];
  return [[...written, "<eos>"].slice(0, panel.result.states.T), source];
}

function layerOf(panel) {
  const layers = panel.result.parts[partOf(panel)];
  panel.layer = clamp(panel.layer, 0, layers.length - 1);
  panel.head = clamp(panel.head, 0, layers[0].N - 1);
  return layers[panel.layer];
}

// The selected query and key in the tokens of a panel: at first the last word.
function selected(panel, queries, keys) {
  const query = clamp(state.query ?? Math.max(0, queries.length - 2), 0, queries.length - 1);
  return { query, key: state.key === null || state.key >= keys.length ? null : state.key };
}

function point(query, key, pin = false) {
  if (state.pinned && !pin) return;
  const same = query === state.query && key === state.key;
  if (same && !pin) return;
  if (pin) state.pinned = !(state.pinned && same);
  state.query = query;
  state.key = key;
  for (const panel of state.panels)
    if (panel.result) {
      renderMaps(panel);
      renderSteps(panel);
    }
  remember();
}

// Update: after a keystroke or a change of settings. `moves` animates the maps from their old weights.

function update(moves = false, only = state.panels, playing = null) {
  const start = performance.now();
  for (const panel of [only].flat()) {
    panel.round = ++view.round;
    panel.playing = playing;
    const before = panel.result?.parts;
    compute(panel);
    renderPanel(panel, moves ? before : null);
    follow(panel);
  }
  view.time = performance.now() - start;
  const [what, time] = view.opened
    ? ["computed", `${view.time.toFixed(0)} ms`]
    : ["opened", `${(performance.now() / 1000).toFixed(1)} s`];
  $("time").replaceChildren(el("span", {}, `${what} in `), time);
  warn();
  view.opened = true;
  remember();
}

function useExample() {
  $("sentence").focus(); // the button goes away
  $("sentence").value = content.text;
  typed(content.text);
}

// A sentence of words that the model does not know; while one types, the last word is often not one yet. Punctuation
// counts where it is unknown, as in the note below the words.
function warn() {
  const warning = $("warning"),
    isWord = (panel, k) => panel.unknown[k] || /[\p{L}\p{N}]/u.test(panel.words[k]),
    words = (panel) => panel.unknown.filter((_, k) => isWord(panel, k));
  const counts = state.panels.filter((panel) => !panel.empty).map((panel) => [words(panel).filter(Boolean).length, words(panel).length]);
  const [unknown, all] = counts.find(([some, all]) => some && 3 * some >= all) ?? [];
  clearTimeout(view.warning);
  const show = () => {
    warning.hidden = !unknown;
    if (!unknown) return;
    warning.replaceChildren(
      `${unknown} of ${all} words are not in the model's vocabulary. It reads each as <unk>, so its answer says little about this sentence. `,
      content.text === state.text ? "" : el("button", { onclick: useExample }, "Use the example"),
    );
  };
  if (unknown && warning.hidden && view.opened) view.warning = setTimeout(show, 500);
  else show();
}

// Maps move to their new weights within a quarter of a second, if they have the same size.
function animate(panel, before) {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches,
    round = panel.round,
    start = performance.now();
  const pairs = Object.entries(panel.result.parts).flatMap(([part, layers]) =>
    layers.map((layer, l) => [layer, before?.[part]?.[l]]),
  );
  if (still || pairs.some(([layer, old]) => !old || old.weights.length !== layer.weights.length)) {
    panel.mixed = null;
    return;
  }
  const step = () => {
    if (panel.round !== round) return;
    const share = Math.min(1, (performance.now() - start) / 240),
      eased = share * (2 - share);
    panel.mixed =
      share < 1
        ? new Map(
            pairs.map(([layer, old]) => [
              layer,
              layer.weights.map((w, k) => old.weights[k] + eased * (w - old.weights[k])),
            ]),
          )
        : null;
    renderMaps(panel);
    if (share < 1) requestAnimationFrame(step);
  };
  step();
}

const weightsOf = (panel, layer) => panel.mixed?.get(layer) ?? layer.weights;

// Draw a panel

function renderPanel(panel, before) {
  renderHead(panel);
  panel.place.grid.hidden = panel.place.more.hidden = panel.empty;
  if (panel.empty) {
    const example = el("button", { onclick: useExample }, "Use the example");
    panel.place.strip.replaceChildren(el("span", { class: "soft" }, "Type a word."), example);
    return;
  }
  if (before) animate(panel, before);
  else panel.mixed = null;
  renderMaps(panel);
  renderAnswer(panel);
  renderEffects(panel);
  renderSteps(panel);
}

function renderHead(panel) {
  const run = runOf(panel),
    model = run.model,
    changes = [],
    { change } = panel;
  if (change.off) changes.push("position off");
  if (change.scale !== null) changes.push(`scale ${change.scale}`);
  if (change.slopes)
    changes.push(`slope of head ${change.slopes.flatMap((own, n) => (own === null ? [] : [n + 1])).join(", ")}`);
  if (change.base !== null) changes.push(`base ${Math.round(change.base)}`);
  if (change.strength !== null) changes.push(`bias × ${change.strength}`);
  if (change.pattern) changes.push(`pattern ${change.pattern.name}`);
  if (change.heads.length) changes.push(`${change.heads.length} head${change.heads.length > 1 ? "s" : ""} off`);
  panel.place.marker.hidden = !changes.length;
  panel.place.changes.textContent = changes.length
    ? `Not what this model was trained with: ${changes.join(", ")}.`
    : "";
  const notes = [];
  if (panel.left)
    notes.push(
      `The first ${panel.words.length} of ${panel.words.length + panel.left} tokens are read${model.task === "classify" ? ", as in training" : ""}.`,
    );
  if (model.task === "lm" && panel.words.length > run.trained)
    notes.push(`It was trained on ${run.trained} tokens at once.`);
  const unknown = new Map();
  panel.words.forEach((word, k) => panel.unknown[k] && unknown.set(word, (unknown.get(word) ?? 0) + 1));
  const listed = Array.from(unknown, ([word, count]) => short(word, 40) + (count > 1 ? ` (${count} ×)` : ""));
  if (listed.length) notes.push(`Not in the vocabulary, read as <unk>: ${listed.join(", ")}.`);
  panel.place.note.textContent = notes.join(" ");
  if (panel.place.step) {
    const own = run.checkpoints[panel.checkpoint];
    panel.place.step.value = panel.checkpoint;
    panel.place.step.setAttribute("aria-valuetext", stepText(own));
    panel.place.stepName.textContent = stepText(own);
    panel.place.stepName.className = panel.checkpoint === run.chosen ? "" : "delta";
    panel.place.reported.setAttribute("aria-pressed", String(panel.checkpoint === run.chosen));
    panel.place.player.textContent = panel.playing ? "Pause" : "Play";
    panel.place.player.setAttribute("aria-pressed", String(Boolean(panel.playing)));
  }
}

function renderMaps(panel) {
  const part = partOf(panel),
    layer = layerOf(panel),
    [queries, keys] = tokensOf(panel, part),
    n = panel.head;
  const { query, key } = selected(panel, queries, keys),
    { T, S, mask } = layer,
    weights = weightsOf(panel, layer),
    place = panel.place;
  const own = { weights, mask, T, S, n, queries, keys, query, key };
  renderTiles(panel, part); // first, for they take their width from the map
  const most = isNarrow() ? 0.46 * window.innerHeight : Infinity, // the controls below stay in view
    width = Math.max(250, Math.min(most, place.mapBox.clientWidth));
  place.geometry = { ...drawMap(place.map, { ...own, width }), T, S };
  place.lineGeometry = {
    ...drawLines(place.lines, {
      ...own,
      ...place.geometry,
      top: state.panels.length > 1 ? 4 : place.geometry.top,
      width: clamp(place.linesBox.clientWidth, 210, 330),
    }),
    T,
    S,
  };
  const isOff = panel.change.heads.includes(`${part}.${panel.layer}.${n}`);
  const slope = place.slopes && part !== "cross" ? `, scale × slope ${number(place.slopes(panel.change)[n], 2)}` : "";
  place.title.textContent = `${place.several ? part + ", " : ""}layer ${panel.layer + 1}, head ${n + 1}${slope}${isOff ? " (off)" : ""}`;
  const i = query,
    hidden = key !== null && mask && !mask[i * S + key];
  const spoken = key === null ? "" : hidden ? "masked" : layer.weights[(n * T + i) * S + key].toFixed(3);
  place.where.replaceChildren(
    el("b", {}, short(queries[i], 32)),
    " → ",
    key === null ? (hasTouch() ? "tap a cell" : "point at a cell") : el("b", {}, short(keys[key], 32)),
    key === null ? "" : `: ${spoken}`,
    state.pinned
      ? el("span", { class: "soft" }, `  pinned; ${hasTouch() ? "tap the cell again to release" : "Escape or another click releases"}`)
      : "",
  );
  place.map.setAttribute(
    "aria-label",
    `Attention map, ${place.title.textContent}: query ${queries[i]}${key === null ? "" : `, key ${keys[key]}, ${spoken}`}`,
  );
  if (document.activeElement === place.map)
    $("live").textContent = `${queries[i]} to ${key === null ? "all" : keys[key]}: ${spoken}`;
  renderStrip(panel, own, part);
}

function renderStrip(panel, { weights, mask, T, S, n, queries, keys, query, key }, part) {
  const cross = part === "cross",
    strip = panel.place.strip,
    offset = keys.length - panel.unknown.length - (taskOf(panel) === "translate" ? 1 : 0);
  const chip = (word, k, kind) => {
    const weight = weights[(n * T + query) * S + k],
      hidden = mask && !mask[query * S + k];
    const unknown =
      part !== "decoder" || taskOf(panel) === "lm" ? panel.unknown[k - Math.max(0, offset)] && kind === "key" : false;
    const classes = [
      "chip",
      k === query && (!cross || kind === "query") ? "query" : "",
      k === key && kind === "key" ? "key" : "",
      state.pinned && k === query ? "pinned" : "",
      unknown ? "unknown" : "",
    ];
    const said =
      kind === "query"
        ? word
        : `${word}${unknown ? " (unknown word)" : ""}: ${hidden ? "masked" : weight.toFixed(3)}`;
    const button = el(
      "button",
      {
        class: classes.filter(Boolean).join(" "),
        dir: "auto",
        title: said,
        "aria-label": said,
        "aria-pressed": String(state.pinned && k === query),
        "data-token": k,
        "data-kind": kind,
        tabindex: k === (kind === "query" || !cross ? query : (key ?? 0)) ? "0" : "-1",
      },
      shown(word),
    );
    if (kind === "key" && !hidden) {
      button.style.backgroundColor = colourOf(weight);
      button.style.color = textOn(weight);
    }
    return button;
  };
  const focused = strip.contains(document.activeElement) ? document.activeElement.dataset : null;
  const rows = cross
    ? [
        el("b", {}, "written"),
        ...queries.map((word, k) => chip(word, k, "query")),
        el("b", { style: "flex-basis:100%;height:0" }),
        el("b", {}, "source"),
        ...keys.map((word, k) => chip(word, k, "key")),
      ]
    : keys.map((word, k) => chip(word, k, "key"));
  strip.replaceChildren(...rows);
  const near = strip.querySelector(".chip.key") ?? strip.querySelector(".chip.query"); // of a long text
  if (near && (strip.scrollHeight > strip.clientHeight + 4 || strip.scrollWidth > strip.clientWidth + 4)) {
    strip.scrollTop = clamp(
      strip.scrollTop,
      near.offsetTop - strip.offsetTop + near.offsetHeight - strip.clientHeight,
      near.offsetTop - strip.offsetTop,
    );
    strip.scrollLeft = clamp(
      strip.scrollLeft,
      near.offsetLeft - strip.offsetLeft + near.offsetWidth - strip.clientWidth,
      near.offsetLeft - strip.offsetLeft,
    );
  }
  if (focused) strip.querySelector(`[data-kind="${focused.kind}"][tabindex="0"]`)?.focus({ preventScroll: true });
}

function renderTiles(panel, part) {
  const layers = panel.result.parts[part],
    { place } = panel,
    wanted = `${part}.${layers.length}.${layers[0].N}`;
  if (place.tileKey !== wanted) {
    place.tileKey = wanted;
    place.tiles = layers.map((_, l) =>
      Array.from({ length: layers[0].N }, (_, n) => {
        const canvas = el("canvas"),
          off = el("button", { onclick: () => toggleHead(panel, part, l, n) });
        const pick = el("button", { class: "pick", onclick: () => chooseHead(panel, l, n) }, canvas);
        return {
          canvas,
          pick,
          off,
          box: el("div", { class: "tile" }, pick, el("div", { class: "under" }, `${l + 1}.${n + 1}`, off)),
        };
      }),
    );
    const across = layers.length <= 4 && layers[0].N <= 4 && (state.panels.length > 1 || isNarrow()); // a column for each layer
    place.heads.style.gridTemplateColumns = across ? "" : `repeat(${layers[0].N}, max-content)`;
    place.heads.style.gridTemplateRows = across ? `repeat(${layers[0].N}, max-content)` : "";
    place.heads.style.gridAutoFlow = across ? "column" : "row";
    place.heads.style.setProperty(
      "--tile",
      (across ? 72 : layers[0].N > 4 ? 84 : layers[0].N > 2 ? 72 : layers.length > 4 ? 80 : 96) + "px",
    );
    place.headsBox.classList.toggle("many", layers[0].N > 4);
    place.heads.replaceChildren(...place.tiles.flat().map((tile) => tile.box));
  }
  place.tiles.forEach((row, l) =>
    row.forEach((tile, n) => {
      const { T, S, mask } = layers[l],
        isOff = panel.change.heads.includes(`${part}.${l}.${n}`),
        on = l === panel.layer && n === panel.head;
      drawTile(tile.canvas, { weights: weightsOf(panel, layers[l]), mask, T, S, n });
      tile.box.className = `tile${on ? " on" : ""}${isOff ? " off" : ""}`;
      tile.pick.setAttribute("aria-label", `Show layer ${l + 1}, head ${n + 1}`);
      tile.pick.setAttribute("aria-pressed", String(on));
      tile.off.textContent = isOff ? "switch on" : "switch off";
      tile.off.setAttribute("aria-label", `Switch layer ${l + 1}, head ${n + 1} ${isOff ? "on" : "off"}`);
    }),
  );
}

function bar(name, now, before) {
  const difference = now - before,
    moved = Math.abs(difference) >= 0.0005;
  return [
    el("span", { class: "name", title: name }, name),
    el(
      "span",
      { class: "track" },
      el("i", { style: `width:${100 * now}%` }),
      moved ? el("u", { style: `left:calc(${100 * before}% - 1px)`, title: `as trained: ${percent(before)}` }) : null,
    ),
    el(
      "span",
      { class: "value" },
      percent(now),
      moved ? el("span", { class: "delta" }, ` ${signed(100 * difference, 1)}`) : null,
    ),
  ];
}

function renderAnswer(panel) {
  const run = runOf(panel),
    task = taskOf(panel),
    place = panel.place.answer,
    rows = el("div", { class: "bars" });
  const parts = [];
  if (task === "translate") {
    const text = tokenizers[run.tokenizer].decode(panel.written);
    parts.push(el("h3", {}, "Translation, greedy"), el("p", { class: "continuation" }, text || "…"));
    if (isChanged(panel) && panel.base)
      parts.push(el("p", { class: "continuation soft" }, "As trained: ", panel.base));
  } else if (task === "classify") {
    run.classes.forEach((name, k) => rows.append(...bar(name, panel.now[k], panel.before[k])));
    parts.push(el("h3", {}, "Who says this?"), rows);
  } else {
    const top = Array.from(panel.now, (p, k) => [p, k])
      .sort((a, b) => b[0] - a[0])
      .slice(0, 8);
    top.forEach(([p, k]) => rows.append(...bar(shown(tokenizers[run.tokenizer].text(k)), p, panel.before[k])));
    parts.push(el("h3", {}, `Next word after “${short(panel.words.at(-1), 20)}”`), rows);
  }
  parts.push(lossLine(panel));
  if (task === "lm" && panel.continuation !== undefined)
    parts.push(el("p", { class: "continuation" }, el("span", {}, "… "), panel.continuation));
  place.replaceChildren(...parts);
}

// The loss of the sentence. Its place is there before it is computed, so that nothing below moves.
function lossLine(panel) {
  const task = taskOf(panel),
    line = el("p", { class: `note loss${task === "classify" ? " long" : ""}` }),
    { now, before } = panel.losses ?? {},
    { classes, checkpoints, chosen } = runOf(panel);
  if (!now || now.loss === null) return line;
  const what = {
    classify: () =>
      `Loss, −ln P(${classes[panel.predicted]}), the answer ${checkpoints.length > 1 ? "at " + stepText(checkpoints[chosen]) : "as trained"}`,
    lm: () => "Loss of this sentence, per token",
    translate: () => "Loss of its own translation, per token",
  }[task]();
  line.append(`${what}: ${now.loss.toFixed(3)} nats`);
  if (Math.abs(now.loss - before.loss) >= 0.0005)
    line.append(el("span", { class: "delta" }, ` (${signed(now.loss - before.loss, 3)})`));
  return line;
}

// What a change alone does to the answer, beside its control.
function effectText(panel, name) {
  const effect = panel.effects?.[name],
    before = panel.losses?.before;
  if (!effect || !before || effect.loss === null) return "";
  if (effect.p !== null)
    return `this change alone: P(${runOf(panel).classes[panel.predicted]}) ${signed(100 * (effect.p - before.p), 1)} points`;
  return `this change alone: loss ${signed(effect.loss - before.loss, 3)} nats`;
}

function renderEffects(panel) {
  for (const control of panel.place.controls) control.refresh();
  panel.place.drawBias?.();
}

function renderSteps(panel) {
  const part = partOf(panel),
    layer = layerOf(panel),
    [queries, keys] = tokensOf(panel, part),
    { query, key } = selected(panel, queries, keys);
  panel.place.stepsTitle.textContent = `“${short(queries[query], 24)}” through ${part === "cross" ? "cross-attention, " : ""}layer ${panel.layer + 1}, head ${panel.head + 1}, step by step`;
  drawSteps(panel.place.steps, layer, panel.head, query, {
    query: queries[query],
    keys,
    key,
    pick: (j) => point(query, j, true),
  });
}

// The table of all heads.
function renderLater(panel) {
  const { table: rows } = panel,
    place = panel.place.table;
  if (!rows) return;
  const task = taskOf(panel),
    run = runOf(panel),
    most = Math.max(...rows.map((row) => Math.abs(row.rise || 0)), 1e-9);
  const score = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
  const heads = [
    "head",
    "rise of loss",
    "",
    task === "classify" ? `P(${run.classes[panel.predicted]}) if off` : "loss if off",
    "previous",
    "first",
    "induction",
    "entropy",
    "distance",
  ];
  const body = el("tbody");
  for (const row of rows) {
    const where = (Math.abs(row.rise || 0) / most) * 50,
      on = row.part === partOf(panel) && row.l === panel.layer && row.n === panel.head;
    const track = el(
      "span",
      { class: "track", title: "left of the middle: the loss falls" },
      el("i", { style: `left:${row.rise < 0 ? 50 - where : 50}%;width:${where}%` }),
    );
    const toggle = el(
      "button",
      {
        onclick: (event) => {
          event.stopPropagation();
          toggleHead(panel, row.part, row.l, row.n);
        },
      },
      row.isOff ? "switch on" : "switch off",
    );
    body.append(
      el(
        "tr",
        { class: on ? "on" : "", onclick: () => chooseHead(panel, row.l, row.n, row.part) },
        el(
          "td",
          {},
          `${panel.place.several ? row.part + " " : ""}${row.l + 1}.${row.n + 1} `,
          toggle,
        ),
        el("td", {}, row.on.loss === null ? "–" : `${signed(row.rise, 3)} nats`),
        el("td", {}, track),
        el("td", {}, row.off.p === null ? score(row.off.loss) : percent(row.off.p)),
        ...["previous", "first", "induction", "entropy"].map((name) => el("td", {}, score(row.scores[name]))),
        el("td", {}, row.scores.distance === undefined ? "–" : row.scores.distance.toFixed(1)),
      ),
    );
  }
  place.replaceChildren(
    el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "All heads" },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, ...heads.map((title) => el("th", { scope: "col" }, title)))),
        body,
      ),
    ),
  );
}

// Of one run on both sides, both show the same head.
function chooseHead(panel, layer, head, part = null) {
  for (const own of viewName() === "changed" ? state.panels : [panel]) {
    Object.assign(own, { layer, head });
    if (part) choosePart(own, part);
    renderMaps(own);
    renderSteps(own);
    renderEffects(own);
    renderLater(own);
  }
  remember();
}

function choosePart(panel, part) {
  panel.part = part;
  for (const button of panel.place.parts.children)
    button.setAttribute("aria-pressed", String(button.dataset.part === part));
}

function toggleHead(panel, part, layer, head) {
  const own = viewName() === "changed" ? mainPanel() : panel, // what is as trained stays so
    name = `${part}.${layer}.${head}`,
    { heads } = own.change;
  own.change.heads = heads.includes(name) ? heads.filter((other) => other !== name) : [...heads, name].sort();
  update(true, own);
}
