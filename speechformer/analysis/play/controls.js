// The controls of a panel, the keyboard, the address that keeps sentence and settings, and the start of the page.

const number = (value, digits = 3) => Number(value.toPrecision(digits));
const encodingsOf = (panel) => Object.values(runOf(panel).model.parts)[0].positions.members;
const memberOf = (panel, ...names) => encodingsOf(panel).find((own) => names.includes(own.name));
const ropeOf = (panel) => encodingsOf(panel).find((own) => ["rope", "xpos"].includes(own.name) && !own.frequencies);
const hasPosition = (panel) => encodingsOf(panel).some((own) => own.name !== "nope");

// A slider or the like: `get` and `set` of the panel's change, and the value as trained beside it.
function control(panel, { name, title, input, show, trained, read, write, group = name, now, ends = [] }) {
  const output = el("span", { class: "now" }),
    small = el("small"),
    label = el("span", {}, title);
  const range = el("span", { class: "ends" }, ends[0], input, ends[1]);
  const box = el("label", { class: "control" }, el("span", { class: "row" }, label, output), range, small);
  const refresh = () => {
    const isOwn = now() !== trained;
    write(now());
    output.textContent = show(now());
    input.disabled = panel.change.off;
    box.classList.toggle("changed", isOwn && !panel.change.off);
    small.textContent = panel.change.off
      ? "No effect while position is off"
      : isOwn
        ? [`trained ${show(trained)}`, effectText(panel, group)].filter(Boolean).join("; ")
        : `as trained`;
  };
  input.addEventListener("input", () => {
    read();
    update(input.type !== "range", panel);
  });
  panel.place.controls.push({ refresh });
  return box;
}

function slider(
  panel,
  { name, title, low, high, step, trained, get, set, show = String, from = (v) => v, to = (v) => v, group, ends },
) {
  const input = el("input", { type: "range", min: low, max: high, step, "aria-label": title });
  if (ends) input.addEventListener("keydown", (event) => coarseStep(event, (high - low) / 25));
  const now = () => get() ?? trained;
  return control(panel, {
    name,
    title,
    input,
    show,
    trained,
    group,
    ends,
    now,
    read: () => {
      const value = from(Number(input.value));
      set(Math.abs(value - trained) < 1e-9 * Math.abs(trained) + 1e-12 ? null : value);
    },
    write: (value) => {
      if (document.activeElement !== input || Math.abs(from(Number(input.value)) - value) > 1e-6)
        input.value = to(value);
      input.setAttribute("aria-valuetext", show(value));
    },
  });
}

// One press of an arrow on a logarithmic slider.
function coarseStep(event, step) {
  const sign = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key],
    { target } = event;
  if (!sign || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  target.value = Number(target.value) + sign * step;
  target.dispatchEvent(new Event("input", { bubbles: true }));
  target.dispatchEvent(new Event("change", { bubbles: true }));
}

function settingsOf(panel) {
  const boxes = [],
    change = () => panel.change,
    alibi = memberOf(panel, "alibi"),
    rope = ropeOf(panel);
  const other = memberOf(panel, "relative", "kerple", "fire");
  if (alibi) {
    const get = (name) =>
      modelOf(panel).tensors.get(`${Object.keys(runOf(panel).model.parts)[0]}.${alibi.prefix}${name}`);
    const own = slopesOf({ ...alibi, scale: 1 }, get, UNCHANGED);
    if (encodingsOf(panel).length === 1)
      panel.place.slopes = (change) => (change.off ? own.map(() => 0) : slopesOf(alibi, get, change));
    boxes.push(
      el("h3", {}, "ALiBi: what distance costs"),
      el(
        "p",
        { class: "about" },
        "ALiBi (attention with linear biases) subtracts slope × distance from each score before the softmax. " +
          "Steep slope: a head sees only near words. Slope 0: distance does not count. The sliders of the slopes are logarithmic.",
      ),
      el("p", { class: "formula" }, "q·k/√H − scale·slope·|i−j|"),
      el("p", { class: "about" }, "i, j: positions of query and key; H: width of a head"),
      slider(panel, {
        name: "scale",
        title: "Scale of all slopes",
        low: 0,
        high: Math.max(8, 2 * alibi.scale),
        step: 0.05,
        trained: alibi.scale,
        show: (v) => v.toFixed(2),
        get: () => change().scale,
        set: (value) => {
          panel.change.scale = value;
        },
      }),
    );
    own.forEach((slope, n) =>
      boxes.push(
        slider(panel, {
          name: `slope${n}`,
          group: "slopes",
          title: `Slope of head ${n + 1}, in every layer`,
          low: -13,
          high: 2,
          step: 0.01,
          trained: slope,
          ends: ["0", "4"],
          show: (v) => v.toFixed(4),
          get: () => change().slopes?.[n] ?? null,
          from: (v) => (v <= -13 ? 0 : 2 ** v),
          to: (v) => (v === 0 ? -13 : Math.log2(v)),
          set: (value) => {
            const all = own.map((_, k) => (k === n ? value : (panel.change.slopes?.[k] ?? null)));
            panel.change.slopes = all.some((v) => v !== null) ? all : null;
            if (panel.head !== n && partOf(panel) !== "cross") chooseHead(panel, panel.layer, n); // to see what it does
          },
        }),
      ),
    );
  }
  if (rope)
    boxes.push(
      el("h3", {}, rope.name === "rope" ? "RoPE: how fast pairs turn" : "xPos: how fast pairs turn"),
      el(
        "p",
        { class: "about" },
        `${rope.name === "rope" ? "RoPE (rotary position embedding)" : "xPos"} rotates queries and keys by their position, two dimensions ` +
          "at a time. A score then depends on the distance. A larger base turns the pairs more slowly, so that distance changes the scores less.",
      ),
      el("p", { class: "formula" }, "angle of pair d at position i = i × base^(−2d/R)"),
      el("p", { class: "about" }, `R: rotated dimensions of a head, here ${rope.R}; d: from 0 to ${rope.R / 2 - 1}. The slider is logarithmic.`),
      slider(panel, {
        name: "base",
        title: "Base",
        low: 0.5,
        high: 6,
        step: 0.01,
        ends: ["3", "10⁶"],
        trained: rope.base,
        show: (v) => Math.round(v).toLocaleString("en"),
        get: () => change().base,
        set: (value) => {
          panel.change.base = value;
        },
        from: (v) => 10 ** v,
        to: Math.log10,
      }),
    );
  if (other)
    boxes.push(
      el("h3", {}, `${{ relative: "T5's bias", kerple: "KERPLE", fire: "FIRE" }[other.name]}: what distance adds`),
      slider(panel, {
        name: "strength",
        title: "Factor on the bias",
        low: 0,
        high: 4,
        step: 0.05,
        trained: 1,
        show: (v) => `× ${v.toFixed(2)}`,
        get: () => change().strength,
        set: (value) => {
          panel.change.strength = value;
        },
      }),
    );
  if (alibi || other) {
    const canvas = el("canvas", { role: "img", "aria-label": "Bias by distance, a line for each head" });
    boxes.push(
      canvas,
      el(
        "p",
        { class: "note", style: "margin:0 0 10px" },
        "Bias by distance: ",
        line("", "this head, "),
        line("faint", "others, "),
        line("dashed", "as trained. "),
        "The axis does not move; a steep line leaves it.",
      ),
    );
    panel.place.drawBias = () => renderBias(panel, canvas, alibi ?? other);
  }
  if (hasPosition(panel)) boxes.push(offControl(panel));
  boxes.push(...patternControls(panel));
  if (taskOf(panel) === "lm") boxes.push(el("h3", {}, "Continue the text"), temperatureControl(panel));
  return boxes;
}

// The bias of each head by distance, now and as trained.
function renderBias(panel, canvas, spec) {
  if (!panel.result || !canvas.parentElement) return;
  const part = Object.keys(runOf(panel).model.parts)[0],
    get = (name) => modelOf(panel).tensors.get(`${part}.${spec.prefix}${name}`);
  const T = Math.max(12, panel.result.states.T),
    N = runOf(panel).model.parts[part].heads;
  const curves = (change) => {
    const own = change.off ? {} : POSITIONS[spec.name](spec, get, change);
    return Array.from({ length: N }, (_, n) =>
      Array.from({ length: T }, (_, d) => (own.bias ? (change.strength ?? 1) * own.bias(n, d, 0) : 0)),
    );
  };
  panel.place.biasRange = drawBias(canvas, {
    now: curves(panel.change),
    trained: curves(UNCHANGED),
    head: panel.head,
    T,
    width: clamp(canvas.parentElement.clientWidth, 180, 300),
  });
}

const orderText = (panel) =>
  taskOf(panel) === "classify"
    ? "the model does not know the order of the words"
    : "only the causal mask tells the order of the words";

function offControl(panel) {
  const input = el("input", { type: "checkbox" });
  const box = el(
    "label",
    { class: "control" },
    el("span", { class: "row" }, el("span", {}, input, " Position off"), el("span", { class: "now" })),
    el("small"),
  );
  panel.place.controls.push({
    refresh: () => {
      input.checked = panel.change.off;
      box.classList.toggle("changed", panel.change.off);
      box.querySelector("small").textContent = panel.change.off
        ? ["trained on", effectText(panel, "off")].filter(Boolean).join("; ")
        : `Switched off, ${orderText(panel)}.`;
    },
  });
  input.onchange = () => {
    panel.change.off = input.checked;
    update(true, panel);
  };
  return box;
}

// What a window means: the keys around a query, of a causal model those before it.
function windowText(panel, { window, dilation = 1 }) {
  const task = taskOf(panel),
    count = window - 1,
    words = `${count} word${count === 1 ? "" : "s"}`,
    apart = dilation > 1 && count ? `, ${dilation} apart` : "";
  if (!count) return "this word alone";
  if (task === "lm") return `this word and the ${count} before${apart}`;
  return task === "classify" ? `${words} on each side${apart}` : `words at most ${count} away${apart}`;
}

const optionsOf = ({ name, ...options }) =>
  [name, ...Object.entries(options).map(([key, value]) => `${key} ${value}`)].join(", ");

// Which keys a query may attend to: a pattern for all layers, with its options.
function patternControls(panel) {
  const trained = runOf(panel).model.patterns,
    mixed = trained.some((own) => JSON.stringify(own) !== JSON.stringify(trained[0]));
  const usual = mixed ? "by layer" : optionsOf(trained[0]),
    select = el("select", { "aria-label": "Attention pattern" }, el("option", { value: "" }, `as trained: ${usual}`));
  for (const name of Object.keys(content.patterns))
    if (mixed || name !== trained[0].name || Object.keys(content.patterns[name]).length)
      select.append(el("option", { value: name }, name));
  const small = el("small"),
    options = el("div"),
    box = el("div", { class: "control" }, select, small);
  const shows = {};
  const draw = () => {
    const { pattern } = panel.change,
      wanted = pattern ? Object.keys(content.patterns[pattern.name]).join() : "";
    const refresh = () => Object.keys(pattern ?? {}).forEach((key) => shows[key]?.());
    if (options.dataset.shown === wanted + pattern?.name) return refresh();
    options.dataset.shown = wanted + pattern?.name;
    options.replaceChildren(
      ...(pattern ? Object.keys(content.patterns[pattern.name]) : []).map((key) => {
        const input = el("input", {
          type: "range",
          min: key === "window" || key === "block" || key === "stride" || key === "dilation" ? 1 : 0,
          max: key === "seed" ? 20 : 16,
          step: 1,
          "aria-label": key,
        });
        const output = el("span", { class: "now" }),
          row = el(
            "label",
            { class: "control", "data-option": key },
            el("span", { class: "row" }, el("span", {}, key), output),
            input,
          );
        shows[key] = () => {
          const own = panel.change.pattern;
          input.value = own[key];
          output.textContent = key === "window" ? `${own.window}: ${windowText(panel, own)}` : own[key];
          input.setAttribute("aria-valuetext", output.textContent);
        };
        input.addEventListener("input", () => {
          panel.change.pattern = { ...panel.change.pattern, [key]: Number(input.value) };
          update(false, panel);
        });
        return row;
      }),
    );
    refresh();
  };
  select.onchange = () => {
    panel.change.pattern = select.value ? { name: select.value, ...content.patterns[select.value] } : null;
    update(true, panel);
  };
  panel.place.controls.push({
    refresh: () => {
      const { pattern } = panel.change;
      select.value = pattern?.name ?? "";
      box.classList.toggle("changed", Boolean(pattern));
      small.textContent = pattern
        ? [`trained ${usual}`, effectText(panel, "pattern")].filter(Boolean).join("; ")
        : "Which keys each query may attend to";
      draw();
    },
  });
  return [el("h3", {}, "Attention pattern"), box, options];
}

function temperatureControl(panel) {
  const input = el("input", { type: "range", min: 0, max: 2, step: 0.05, "aria-label": "Temperature" }),
    output = el("span", { class: "now" });
  input.addEventListener("input", () => {
    state.temperature = Number(input.value);
    for (const own of state.panels) follow(restart(own));
    remember();
  });
  panel.place.controls.push({
    refresh: () => {
      input.value = state.temperature;
      output.textContent = state.temperature.toFixed(2);
    },
  });
  const again = el(
    "button",
    {
      onclick: () => {
        state.seed += 1;
        for (const own of state.panels) follow(restart(own));
        remember();
      },
    },
    "Sample again",
  );
  return el(
    "div",
    { class: "control" },
    el("span", { class: "row" }, el("span", {}, "Temperature"), output),
    input,
    el("small", {}, "0 takes the most probable word each time"),
    again,
  );
}

function restart(panel) {
  panel.round = ++view.round;
  panel.table = null;
  renderEffects(panel);
  return panel;
}

// A change that the page has made as an example goes with its view, unless it was changed further.
function dropExample() {
  const own = mainPanel();
  if (own.example && JSON.stringify(own.change) === own.example) own.change = untouched();
  own.example = null;
}

function swapRun(panel, run) {
  dropExample();
  Object.assign(panel, newPanel(run));
  rebuild();
}

function rebuild() {
  if (viewName() === "changed")
    Object.assign(state.panels[0], { checkpoint: mainPanel().checkpoint, change: untouched() });
  $("panels").replaceChildren(...state.panels.map(buildPanel));
  $("panels").classList.toggle("two", state.panels.length > 1);
  for (const button of $("view").children) {
    button.hidden = button.dataset.view === "runs" && content.runs.length < 2;
    button.setAttribute("aria-pressed", String(button.dataset.view === viewName()));
  }
  nameSides();
  drawLegends();
  suggest();
  update();
}

// One view of the model that is shown; beside it, its weights as trained or another run.
function chooseView(name) {
  const own = mainPanel(),
    { run, checkpoint, part, layer, head } = own;
  if (name === viewName()) return;
  dropExample();
  if (name === "changed") {
    if (!isChanged(own)) {
      own.change = { ...untouched(), ...firstChange(own) };
      own.example = JSON.stringify(own.change);
    }
    state.panels = [{ ...newPanel(run), checkpoint, part, layer, head }, own];
  } else state.panels = name === "one" ? [own] : [own, newPanel((run + 1) % content.runs.length)];
  state.front = state.panels.indexOf(own);
  rebuild();
}

// A phone shows one side at a time.
const sideNames = () =>
  viewName() === "changed" ? ["As trained", "Changed"] : state.panels.map((panel) => runOf(panel).label);

function showSide(side) {
  state.front = side;
  [...$("panels").children].forEach((panel, k) => panel.classList.toggle("front", k === side));
  nameSides();
  redraw();
}

function nameSides() {
  const buttons = sideNames().map((name, k) =>
    el("button", { "aria-pressed": String(k === state.front), onclick: () => showSide(k) }, name),
  );
  $("sides").replaceChildren(...(state.panels.length > 1 ? buttons : []));
}

function drawLegends() {
  for (const { place } of state.panels) {
    place.legend.width = 120;
    place.legend.height = 1;
    const pen = place.legend.getContext("2d");
    for (let k = 0; k < 120; k++) {
      pen.fillStyle = colourOf(k / 119);
      pen.fillRect(k, 0, 1, 1);
    }
  }
}

// Pointing and keys

function cellAt(event, { left, top, cell, T, S }) {
  const box = event.currentTarget.getBoundingClientRect();
  const j = Math.floor((event.clientX - box.left - left) / cell),
    i = Math.floor((event.clientY - box.top - top) / cell);
  return [clamp(i, 0, T - 1), j < 0 || j >= S ? null : j];
}

// Whether the pointer has moved: browsers also send events when the page moves under a resting pointer.
function hasMoved(event) {
  const same = view.pointer && view.pointer[0] === event.screenX && view.pointer[1] === event.screenY;
  view.pointer = [event.screenX, event.screenY];
  return !same;
}

function listenToMap(panel) {
  const { map, lines } = panel.place;
  map.onmousemove = (event) => hasMoved(event) && point(...cellAt(event, panel.place.geometry));
  map.onclick = (event) => point(...cellAt(event, panel.place.geometry), true);
  lines.onmousemove = lines.onclick = (event) => {
    if (event.type === "mousemove" && !hasMoved(event)) return;
    const { row, top, T } = panel.place.lineGeometry,
      i = clamp(Math.floor((event.clientY - lines.getBoundingClientRect().top - top) / row), 0, T - 1);
    point(i, state.key, event.type === "click");
  };
}

// Keys work wherever the focus is, but in fields that use them themselves. Arrows scroll while no map is in view.
function onKey(event) {
  const { target, key } = event,
    on = (selector) => Boolean(target.closest?.(selector));
  const bracket = "[]".includes(key), // many keyboards have it on AltGr
    modified = !bracket && (event.ctrlKey || event.metaKey || event.altKey),
    isField = on("input:not([type=range], [type=checkbox]), select") && key !== "Escape";
  if (event.defaultPrevented || modified || isField || $("help").open) return;
  const side = [...$("panels").children].findIndex((own) => own.contains(target)),
    panel = state.panels[side] ?? mainPanel();
  if (!$("keys").checked && target !== panel.place.map) return;
  if (key === "?") $("help").showModal();
  else if (key === "Escape" && state.pinned) {
    state.pinned = false;
    redraw();
    remember();
  } else if (panel.empty || !keyInMap(panel, key, target === panel.place.map, on)) return;
  event.preventDefault();
}

// What a key does to the map of a panel; whether it does anything.
function keyInMap(panel, key, focused, on) {
  const { T, S } = layerOf(panel),
    { query, key: column } = selected(panel, ...tokensOf(panel, partOf(panel)));
  const arrows = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key],
    ends = focused && { Home: [-T, -S], End: [T, S] }[key],
    heads = { "[": -1, "]": 1, ...(focused ? { PageUp: -1, PageDown: 1 } : {}) }[key];
  const { top, bottom } = panel.place.map.getBoundingClientRect(),
    inView = bottom > 150 && top < window.innerHeight - 100;
  if (ends || (arrows && inView && !on("input, .scroll[tabindex]"))) {
    const [down, right] = ends || arrows,
      j = column !== null ? column + right : ends ? right : query; // at first the diagonal
    moveTo(clamp(query + down, 0, T - 1), clamp(j, 0, S - 1));
  } else if (key === "Enter" || key === " ") {
    if (!focused && (key === " " || on("button, a, input, [tabindex]"))) return false;
    point(query, column, true);
  } else if (heads) moveHead(panel, heads);
  else if (key.toLowerCase() === "o") toggleHead(panel, partOf(panel), panel.layer, panel.head);
  else return false;
  return true;
}

// Select a cell, also if one is pinned.
function moveTo(query, key) {
  Object.assign(state, { query, key });
  for (const panel of state.panels)
    if (panel.result) {
      renderMaps(panel);
      renderSteps(panel);
    }
  remember();
}

function moveHead(panel, step) {
  const layers = panel.result.parts[partOf(panel)],
    N = layers[0].N,
    next = clamp(panel.layer * N + panel.head + step, 0, layers.length * N - 1);
  chooseHead(panel, Math.floor(next / N), next % N);
}

function listenToStrip(panel) {
  const { strip } = panel.place;
  const chosen = (event) => event.target.closest(".chip")?.dataset;
  const place = ({ token, kind }) =>
    partOf(panel) === "cross" && kind === "key"
      ? [selected(panel, ...tokensOf(panel, "cross")).query, Number(token)]
      : [Number(token), state.key];
  strip.onmouseover = (event) => {
    const own = chosen(event);
    if (own && hasMoved(event)) point(...place(own));
  };
  strip.onclick = (event) => {
    const own = chosen(event);
    if (own) point(...place(own), true);
  };
  strip.onkeydown = (event) => {
    const own = chosen(event),
      step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!own || !step) return;
    event.preventDefault();
    const [query, key] = place({ ...own, token: Math.max(0, Number(own.token) + step) });
    moveTo(query, key);
  };
}

// The address: sentence and settings in its fragment, for links

function addressOf() {
  const query = new URLSearchParams({ text: state.text });
  if (state.query !== null) query.set("query", state.query);
  if (state.key !== null) query.set("key", state.key);
  if (state.pinned) query.set("pinned", "1");
  if (state.theme) query.set("theme", state.theme);
  if (state.temperature !== 1) query.set("temperature", state.temperature);
  if (state.seed !== 1) query.set("seed", state.seed);
  state.panels.forEach((panel, k) => {
    const { change } = panel,
      prefix = "ab"[k] + ".",
      set = (name, value) => query.set(prefix + name, value);
    if (k || panel.run) set("run", panel.run);
    if (panel.checkpoint !== runOf(panel).chosen) set("checkpoint", panel.checkpoint);
    if (panel.part) set("part", panel.part);
    set("layer", panel.layer + 1);
    set("head", panel.head + 1);
    if (change.off) set("off", 1);
    for (const name of ["scale", "base", "strength"]) if (change[name] !== null) set(name, change[name]);
    if (change.slopes) set("slopes", change.slopes.map((slope) => slope ?? "").join("_"));
    if (change.pattern)
      set(
        "pattern",
        [
          change.pattern.name,
          ...Object.entries(change.pattern)
            .filter(([key]) => key !== "name")
            .map(([key, value]) => `${key}=${value}`),
        ].join("_"),
      );
    if (change.heads.length) set("heads", change.heads.join("_"));
  });
  return "#" + query;
}

function writeAddress() {
  try {
    history.replaceState(null, "", addressOf());
    view.hash = location.hash;
  } catch {
    /* an embedded page may have no address */
  }
}

// Browsers allow few changes of the address a second. An address that was entered meanwhile stays: it will be read.
function remember() {
  view.address ??= setTimeout(() => {
    view.address = null;
    if (location.hash === view.hash) writeAddress();
  }, 200);
}

function readAddress() {
  view.hash = location.hash;
  const query = new URLSearchParams(location.hash.slice(1)),
    numeric = (name, low, high) => {
      const value = Number(query.get(name));
      return query.get(name) !== null && query.get(name) !== "" && Number.isFinite(value)
        ? clamp(value, low, high)
        : null;
    };
  const whole = (name, low, high) => {
    const value = numeric(name, low, high);
    return value === null ? null : Math.round(value);
  };
  if (query.get("text") !== null) state.text = query.get("text");
  state.query = whole("query", 0, 1000);
  state.key = whole("key", 0, 1000);
  state.pinned = query.get("pinned") === "1";
  state.theme = ["light", "dark"].includes(query.get("theme")) ? query.get("theme") : null;
  state.temperature = numeric("temperature", 0, 2) ?? 1;
  state.seed = whole("seed", 1, 2 ** 31) ?? 1;
  const single = whole("layer", 1, 1000),
    prefixes = [
      "a.",
      ...(query.get("b.run") !== null ? ["b."] : []),
    ];
  state.panels = prefixes.map((prefix, k) => {
    const panel = newPanel(whole(prefix + "run", 0, content.runs.length - 1) ?? Math.min(k, content.runs.length - 1)),
      change = panel.change;
    panel.checkpoint = whole(prefix + "checkpoint", 0, runOf(panel).checkpoints.length - 1) ?? panel.checkpoint;
    panel.part = ["cross", "encoder", "decoder"].includes(query.get(prefix + "part"))
      ? query.get(prefix + "part")
      : null;
    panel.layer = (whole(prefix + "layer", 1, 1000) ?? single ?? 1) - 1;
    panel.head = (whole(prefix + "head", 1, 1000) ?? whole("head", 1, 1000) ?? 1) - 1;
    change.off = query.get(prefix + "off") === "1";
    change.scale = numeric(prefix + "scale", 0, 1000);
    change.base = numeric(prefix + "base", 1.01, 1e9);
    change.strength = numeric(prefix + "strength", 0, 100);
    const slopes = query
      .get(prefix + "slopes")
      ?.split("_")
      .map((slope) => (slope === "" || !Number.isFinite(Number(slope)) ? null : Number(slope)));
    if (slopes?.some((slope) => slope !== null)) change.slopes = slopes;
    const [name, ...options] = (query.get(prefix + "pattern") ?? "").split("_");
    if (Object.hasOwn(content.patterns, name)) {
      change.pattern = { name, ...content.patterns[name] };
      for (const [key, value] of options.map((option) => option.split("=")))
        if (key !== "name" && Object.hasOwn(change.pattern, key) && /^\d{1,3}$/.test(value))
          change.pattern[key] = Math.max(["tokens", "links", "seed"].includes(key) ? 0 : 1, Number(value));
    }
    change.heads = (query.get(prefix + "heads") ?? "")
      .split("_")
      .filter((own) => /^(encoder|decoder|cross)\.\d+\.\d+$/.test(own))
      .sort();
    return panel;
  });
  state.front = state.panels.indexOf(mainPanel());
}

// What a newcomer may try, as buttons

// Changes of the model: a name, the change, and what to see.
function suggestions(panel) {
  const alibi = memberOf(panel, "alibi"),
    rope = ropeOf(panel),
    slopes = panel.place?.slopes?.(UNCHANGED),
    own = [];
  if (alibi && slopes)
    own.push([
      "head 1 sees only near words: slope 1",
      { slopes: slopes.map((_, n) => (n ? null : 1)) },
      "Its weights move to the diagonal of the map.",
    ]);
  if (alibi)
    own.push(
      ["distance does not count: scale 0", { scale: 0 }, "Far words no longer cost more than near ones."],
      ["distance costs 8 times more: scale 8", { scale: 8 }, "The weights move to the diagonal of the map."],
    );
  if (rope) own.push(["turn faster: RoPE's base 10", { base: 10 }, "Now distance changes each score more."]);
  if (hasPosition(panel)) own.push(["switch position off", { off: true }, `Now ${orderText(panel)}.`]);
  const pattern = { name: "window", ...content.patterns.window, window: 3 };
  own.push([
    `see ${windowText(panel, pattern)}: window ${pattern.window}`,
    { pattern },
    "All other cells of the map are masked.",
  ]);
  return own;
}

const firstChange = (panel) => (memberOf(panel, "alibi") ? { scale: 8 } : suggestions(panel)[0][1]);

function suggest() {
  const panel = mainPanel(),
    wide = { one: "", changed: " on the right", runs: " on the left" }[viewName()],
    side = isNarrow() && wide ? ` on “${sideNames()[state.panels.indexOf(panel)]}”` : wide;
  const set = (change) => () => {
    Object.assign(panel, { change: { ...untouched(), ...change }, example: null });
    if (isNarrow() && state.panels[state.front] !== panel) showSide(state.panels.indexOf(panel));
    update(true, panel);
  };
  const items = [...suggestions(panel), ["as trained", {}]].flatMap(([text, change], k) => [
    k ? " · " : "",
    el("button", { onclick: set(change) }, text),
  ]);
  $("try").replaceChildren(`Try${side}: `, ...items);
  $("guide").replaceChildren(...guide(panel, set).map((step) => el("li", {}, ...step)));
}

// Three steps: look, change, and find what the answer needs.
function guide(panel, set) {
  const task = taskOf(panel),
    strong = (text) => el("b", {}, text),
    name = (text) => el("em", {}, text),
    button = (text, act) => {
      const show = () => {
        act();
        if (isNarrow()) mainPanel().place.stage.scrollIntoView();
      };
      return el("button", { onclick: show }, text);
    };
  const [[text, change, effect]] = suggestions(panel),
    word = task === "translate" ? "a word of the translation" : "a word",
    plays = [" ", name("Play"), " beside ", name("Training"), " shows how this came about."],
    table = el("button", { onclick: () => mainPanel().place.headsSection.scrollIntoView({ behavior: "smooth" }) }, "What each head does");
  return [
    [
      strong("Look. "),
      `${hasTouch() ? "Tap" : "Point at"} ${word}: the stronger the colour of another word, the more this head reads from it. Choose a head in `,
      name("All heads"),
      ".",
      ...(runOf(panel).checkpoints.length > 2 ? plays : []),
    ],
    [
      strong("Change the model: "),
      button(text, set(change)),
      `. ${effect} The answer follows. `,
      button("Compare", () => chooseView("changed")),
      " with the model as trained. ",
      name("Reset"),
      " undoes it.",
    ],
    task === "lm"
      ? [
          strong("Find what matters. "),
          button("Write the sentence twice", $("repeat").onclick),
          ". A head with high ",
          name("induction"),
          " in ",
          table,
          " attends to what followed the same word before. Switch it off: does the loss rise?",
        ]
      : [
          strong("Find what matters. "),
          "The first row of ",
          table,
          ` is the head that the ${task === "classify" ? "answer" : "translation"} needs most. Switch it off. Do its weights look as if it mattered?`,
        ],
  ];
}

// Start

function useTheme() {
  const theme = state.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  usePalette(theme);
}

function redraw() {
  drawLegends();
  suggest();
  for (const panel of state.panels) {
    arrange(panel);
    if (panel.result) renderPanel(panel, null);
  }
}

function typed(text) {
  state.text = text;
  state.pinned = false;
  state.query = state.key = null;
  update();
}

function start() {
  readAddress();
  useTheme();
  const tasks = {
    classify: "It guesses which speaker said a sentence.",
    lm: "It says which word comes next.",
    translate: "It translates.",
  };
  $("lead").textContent =
    `A trained model runs in this page; nothing leaves your computer. ${[...new Set(content.runs.map((run) => tasks[run.model.task]))].join(" ")}`;
  $("sentence").value = state.text;
  $("sentence").oninput = (event) => typed(event.target.value);
  $("repeat").onclick = () => {
    $("sentence").value = `${state.text} ${state.text}`;
    typed($("sentence").value);
  };
  for (const button of $("view").children) button.onclick = () => chooseView(button.dataset.view);
  $("theme").onclick = () => {
    state.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    useTheme();
    redraw();
    remember();
  };
  $("share").onclick = async () => {
    writeAddress();
    let copied = true;
    try {
      await navigator.clipboard.writeText(location.href);
    } catch {
      copied = false;
    }
    $("share").textContent = copied ? "Copied" : "It is in the address bar";
    setTimeout(() => {
      $("share").textContent = "Copy link";
    }, 1500);
  };
  document.addEventListener("keydown", onKey);
  $("ask").onclick = () => $("help").showModal();
  $("terms").replaceChildren(...describe(Object.keys(TERMS), "div"));
  const height = () => document.documentElement.style.setProperty("--bar", `${$("bar").offsetHeight}px`);
  new ResizeObserver(height).observe($("bar"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    useTheme();
    redraw();
  });
  addEventListener("hashchange", () => {
    readAddress();
    useTheme();
    $("sentence").value = state.text;
    rebuild();
  });
  let resized = null;
  addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(redraw, 60);
  });
  $("foot").replaceChildren(
    el(
      "p",
      {},
      content.runs.length > 1
        ? "Heads are not ordered: head 1 of one run need not correspond to head 1 of another, even if only the seed differs."
        : "",
    ),
  );
  rebuild();
}

start();
