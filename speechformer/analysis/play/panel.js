// The elements of a panel: a run with its checkpoint, answer, settings and maps.

const box = (name, ...children) => el("div", { class: name }, ...children);
const KINDS = { classify: "classifier", lm: "language model", translate: "translator" };
const LOSSES = {
  classify: "The loss is −ln P of the class that this checkpoint predicts as trained: ",
  lm: "The loss is that of the next token, the mean over this sentence.",
  translate: "The loss is that of the model's own translation, the mean over its tokens.",
};

const lossText = ({ model, checkpoints, chosen, reported }) =>
  LOSSES[model.task] + (model.task === "classify" ? `${reported}, ${stepText(checkpoints[chosen])}.` : "");

const TERMS = {
  weight: "how much a query reads from a key in this head: the colour of a cell or word, the strength of a line.",
  "rise of loss": "how much worse the answer gets without a head, its output set to zero.",
  query: "the token that looks; a row of the map. Its weights sum to 1.",
  key: "a token that is looked at; a column of the map.",
  previous: "mean weight of the token before the query.",
  first: "mean weight of the first token, a “sink”.",
  induction: "mean weight of the token after an earlier occurrence of the same word; – without a repeated word.",
  entropy: "of the weights of a query, in nats, mean over queries; 0: all weight is on one key.",
  distance: "mean number of tokens between query and key, by weight.",
};
// A mark of a legend, and what it means.
const mark = (kind, ...meaning) => el("span", {}, el("i", { class: kind }), " ", ...meaning);
const line = (kind, text) => mark(`line ${kind}`, text);
const describe = (names, tag) => names.map((name) => el(tag, {}, el("b", {}, name), ": ", TERMS[name]));

function buildPanel(panel, side) {
  panel.place = { controls: [], several: taskOf(panel) === "translate" };
  const { place } = panel;
  const head = buildHead(panel);
  buildGrid(place);
  buildSections(place, lossText(runOf(panel)));
  place.settings.append(...settingsOf(panel));
  listenToStrip(panel);
  listenToMap(panel);
  const isReference = viewName() === "changed" && side === 0;
  const name = `panel${isReference ? " reference" : ""}${side === state.front ? " front" : ""}`;
  return el("section", { class: name, "aria-label": runOf(panel).label }, head, place.grid, place.more);
}

// What stays in view: run, checkpoint, marker of changes, tokens.
function buildHead(panel) {
  const { place } = panel,
    run = runOf(panel);
  const kind = [
    KINDS[run.model.task],
    run.finished ? "" : "training not finished",
    run.half ? "weights in float16" : "",
  ];
  const who = box("who", chooseRun(panel), el("span", { class: "soft" }, kind.filter(Boolean).join(", ")));
  if (viewName() === "changed") who.prepend(el("b", {}, panel === state.panels[0] ? "As trained" : "Changed"));
  if (run.checkpoints.length > 1) place.training = chooseCheckpoint(panel);
  place.who = who;
  const reset = () => {
    panel.change = untouched();
    update(true, panel);
  };
  place.changes = el("span");
  place.marker = el("p", { class: "marker", role: "status", hidden: true }, place.changes);
  place.marker.append(el("button", { onclick: reset }, "Reset"));
  place.parts = box("tools", ...["cross", "encoder", "decoder"].map((part) => partButton(panel, part)));
  place.parts.hidden = !place.several;
  place.strip = el("div", { class: "strip", role: "toolbar", "aria-label": "Tokens" });
  place.note = el("p", { class: "note" });
  return box("head", who, place.parts, place.marker, place.strip, place.note);
}

function chooseRun(panel) {
  if (content.runs.length === 1) return el("h2", {}, runOf(panel).label);
  const options = content.runs.map((own, k) => el("option", { value: k, selected: k === panel.run }, own.label));
  const change = (event) => swapRun(panel, Number(event.target.value));
  return el("select", { "aria-label": "Run", onchange: change }, ...options);
}

function chooseCheckpoint(panel) {
  const { place } = panel,
    most = runOf(panel).checkpoints.length - 1;
  place.step = el("input", { type: "range", min: 0, max: most, step: 1, "aria-label": "Training: checkpoint" });
  place.stepName = el("span");
  place.step.addEventListener("input", () => showCheckpoint(panel, Number(place.step.value)));
  if (memberOf(panel, "alibi")?.learned) place.step.addEventListener("change", rebuild); // each has its own slopes
  const own = runOf(panel),
    few = own.checkpoints.length,
    share = few < own.total ? `${few} of ${own.total} checkpoints` : "";
  const choose = () => {
    showCheckpoint(panel, own.chosen);
    if (memberOf(panel, "alibi")?.learned) rebuild();
  };
  place.reported = el("button", { onclick: choose }, `${own.reported}: ${stepText(own.checkpoints[own.chosen])}`);
  place.player = el("button", { class: "player", title: "Show the checkpoints, one after another", onclick: () => play(panel) });
  const label = el("label", {}, el("span", { class: "soft" }, "Training"), place.step);
  const note = share ? el("span", { class: "soft", title: "Evenly spaced, so that the page stays small" }, share) : null;
  return box("steps", label, place.stepName, place.player, place.reported, note);
}

function showCheckpoint(panel, checkpoint, playing = null) {
  for (const own of coupled(panel)) own.checkpoint = checkpoint;
  update(true, coupled(panel), playing);
}

// The checkpoints from this one on, from the first if it is the last; until a second click, or until something else
// changes the panel.
async function play(panel) {
  const last = runOf(panel).checkpoints.length - 1,
    playing = panel.playing ? null : ++view.round;
  if (!playing) {
    for (const own of coupled(panel)) own.playing = null;
    for (const own of coupled(panel)) renderHead(own);
    return;
  }
  showCheckpoint(panel, panel.checkpoint === last ? 0 : panel.checkpoint + 1, playing);
  for (;;) {
    await pause(800);
    if (panel.playing !== playing || !state.panels.includes(panel)) return;
    const next = panel.checkpoint + 1;
    showCheckpoint(panel, Math.min(next, last), next < last ? playing : null);
    if (next >= last && memberOf(panel, "alibi")?.learned) rebuild();
  }
}

const stepText = ({ step }) => (step === null ? "mean of steps" : step === 0 ? "step 0, initial weights" : `step ${step}`);

function partButton(panel, part) {
  const choose = () => chooseHead(panel, panel.layer, panel.head, part);
  const pressed = String(part === (panel.part ?? "cross"));
  return el("button", { "data-part": part, "aria-pressed": pressed, onclick: choose }, part);
}

// On a phone the answer belongs to the map: both stay in view while the settings move, and the slider over the training.
// A node that is in its place stays there, with the focus that it may have.
function arrange({ place }) {
  const beside = isNarrow() ? place.stage : place.left,
    home = isNarrow() ? place.left : place.who;
  if (place.answer.parentNode !== beside) beside.prepend(place.answer);
  if (!place.training || place.training.parentNode === home) return;
  if (isNarrow()) home.prepend(place.training);
  else home.append(place.training);
}

// Answer and settings, the map of one head, lines, and the maps of all heads.
function buildGrid(place) {
  const role = { tabindex: "0", role: "application", "aria-roledescription": "attention map" };
  place.title = el("span");
  place.where = el("div", { class: "place" });
  place.map = el("canvas", { class: "map", ...role });
  place.lines = el("canvas", { "aria-hidden": "true" });
  place.mapBox = box("scroll", place.map);
  place.linesBox = box("scroll", place.lines);
  place.answer = box("answer");
  place.settings = box("settings");
  place.heads = box("heads");
  place.headsBox = box("", el("h3", {}, "All heads (layer.head)"), place.heads);
  place.legend = el("canvas", { "aria-hidden": "true" });
  const legend = box(
    "legend",
    el("span", {}, "weight 0 ", place.legend, " 1"),
    mark("stripes", "masked"),
    el("span", {}, "row: query; column: key; a row sums to 1"),
  );
  const jump = (text, name) => {
    const scroll = () => place[name].scrollIntoView({ behavior: "smooth" });
    return el("button", { onclick: scroll }, text);
  };
  const jumps = box(
    "jumps",
    jump("Step by step ↓", "stepsSection"),
    jump("What each head does ↓", "headsSection"),
  );
  place.stage = box("stage", el("h3", {}, "Attention: ", place.title), place.where, place.mapBox);
  place.left = box("left", place.settings);
  arrange({ place });
  place.grid = box(
    "grid",
    place.left,
    box("middle", place.stage, legend, jumps),
    box(
      "second",
      el("h3", {}, "Query → key"),
      el("div", { class: "place" }),
      place.linesBox,
      box("legend", line("", "chosen query, weights from .01"), line("faint", "other queries, from .06")),
    ),
    place.headsBox,
  );
}

// One query step by step, and the table of all heads.
function buildSections(place, loss) {
  place.stepsTitle = el("h2");
  place.steps = box("");
  place.table = box("", el("p", { class: "soft" }, "Computing …"));
  place.stepsSection = el("section", { class: "wide" }, place.stepsTitle, place.steps);
  place.headsSection = el(
    "section",
    { class: "wide" },
    el("h2", {}, "What each head does for this sentence"),
    el("p", { class: "soft" }, "Two measures of importance. The table is sorted by the second."),
    box("legend measures", mark("shade", ...describe(["weight"], "span")), mark("block", ...describe(["rise of loss"], "span"), ` ${loss}`)),
    el("p", { class: "soft" }, "They differ: a head can put all weight on one word, and the answer may not need it."),
    place.table,
    el("ul", { class: "soft columns" }, ...describe(["previous", "first", "induction", "entropy", "distance"], "li")),
  );
  place.more = box("", place.stepsSection, place.headsSection);
}
