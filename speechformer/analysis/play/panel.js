// The elements of a panel: a run with its checkpoint, answer, settings and maps.

const box = (name, ...children) => el("div", { class: name }, ...children);
const KINDS = { classify: "classifier", lm: "language model", translate: "translator" };
const LOSSES = {
  classify: "The loss is −ln P of the class that the model as trained predicts.",
  lm: "The loss is that of the next token, the mean over this sentence.",
  translate: "The loss is that of the model's own translation, the mean over its tokens.",
};

function buildPanel(panel) {
  panel.place = { controls: [], several: taskOf(panel) === "translate" };
  const { place } = panel;
  const head = buildHead(panel);
  buildGrid(place);
  buildSections(place, LOSSES[taskOf(panel)]);
  place.settings.append(...settingsOf(panel));
  listenToStrip(panel);
  listenToMap(panel);
  return el("section", { class: "panel", "aria-label": runOf(panel).label }, head, place.grid, place.more);
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
  if (run.checkpoints.length > 1) who.append(chooseCheckpoint(panel));
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
  place.step = el("input", { type: "range", min: 0, max: most, step: 1, "aria-label": "Checkpoint" });
  place.stepName = el("span", { class: "soft" });
  place.step.addEventListener("input", () => {
    panel.checkpoint = Number(place.step.value);
    update(true, panel);
  });
  if (memberOf(panel, "alibi")?.learned) place.step.addEventListener("change", rebuild); // each has its own slopes
  return el("label", { class: "steps" }, el("span", { class: "soft" }, "training"), place.step, place.stepName);
}

function partButton(panel, part) {
  const choose = () => chooseHead(panel, panel.layer, panel.head, part);
  const pressed = String(part === (panel.part ?? "cross"));
  return el("button", { "data-part": part, "aria-pressed": pressed, onclick: choose }, part);
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
    el("span", {}, el("i", { class: "stripes" }), " masked"),
    el("span", {}, "row: query; column: key; a row sums to 1"),
  );
  const jump = (text, name) => {
    const scroll = () => place[name].scrollIntoView({ behavior: "smooth" });
    return el("button", { onclick: scroll }, text);
  };
  const jumps = box(
    "jumps",
    jump("This query step by step ↓", "stepsSection"),
    jump("What each head does ↓", "headsSection"),
  );
  place.grid = box(
    "grid",
    box("left", place.answer, place.settings),
    box("", el("h3", {}, "Attention: ", place.title), place.where, place.mapBox, legend, jumps),
    box("second", el("h3", {}, "Query → key"), el("div", { class: "place" }), place.linesBox),
    place.headsBox,
  );
}

// One query step by step, and the table of all heads.
function buildSections(place, loss) {
  place.stepsTitle = el("h2");
  place.steps = box("");
  place.table = box("", el("p", { class: "soft" }, "Computing …"));
  const about =
    `Sorted by how much the loss rises when the head's output is set to zero. ${loss} Previous, first, induction: ` +
    "mean attention to the token before, to the first one (a “sink”), and to the token after an earlier occurrence of " +
    "the same word.";
  place.stepsSection = el("section", { class: "wide" }, place.stepsTitle, place.steps);
  const title = el("h2", {}, "What each head does for this sentence");
  place.headsSection = el("section", { class: "wide" }, title, el("p", { class: "soft" }, about), place.table);
  place.more = box("", place.stepsSection, place.headsSection);
}
