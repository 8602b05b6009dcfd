// The forward pass of a trained model, in the order of `models/` and `layers/`. Read it beside those files: names,
// formulas and shapes are theirs. Tensors are flat Float32Arrays without a batch dimension:
//
//   T queries (tokens)   S keys   D width of the model   N heads   H width of a head   V vocabulary
//   K heads of keys and values, of which each serves N / K heads of queries
//   x_TD is T rows of D numbers; q, k and v hold head n in columns n H to (n + 1) H of rows of N H.
//
// A `change` says what differs from training: {off, scale, slopes, base, strength, pattern, heads}; see `UNCHANGED`.

const UNCHANGED = { off: false, scale: null, slopes: null, base: null, strength: null, pattern: null, heads: [] };

// Weights: the safetensors format, a JSON header with the place of each tensor, then their bytes.

function decodeBase64(text) {
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let k = 0; k < bytes.length; k++) bytes[k] = binary.charCodeAt(k);
  return bytes;
}

function halfToFloat(half) {
  const sign = half & 0x8000 ? -1 : 1, exponent = (half >> 10) & 31, fraction = half & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return exponent === 31 ? (fraction ? NaN : sign * Infinity) : sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

const HALVES = Float32Array.from({ length: 2 ** 16 }, (_, half) => halfToFloat(half));

// The tensors of a file by name. Two names may share one, such as an embedding table and an output layer.
function decodeSafetensors(base64) {
  const bytes = decodeBase64(base64), size = Number(new DataView(bytes.buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + size))), tensors = new Map();
  const metadata = header.__metadata__ ?? {};
  delete header.__metadata__;
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(header)) {
    const own = bytes.slice(8 + size + from, 8 + size + to).buffer;
    const data = dtype === "F16" ? new Float32Array(own.byteLength / 2) : new Float32Array(own);
    if (dtype === "F16") new Uint16Array(own).forEach((half, k) => { data[k] = HALVES[half]; });
    tensors.set(name, { shape, data });
  }
  const shared = JSON.parse(metadata.shared ?? "{}");
  for (const [name, first] of Object.entries(shared)) tensors.set(name, tensors.get(first));
  return tensors;
}

// Building blocks

// y = x W^T + b for T rows. Four rows at a time read each weight once.
function linear(x, T, weight, bias) {
  const [O, D] = weight.shape, w = weight.data, y = new Float32Array(T * O);
  for (let t = 0; t < T; t += 4) {
    const a = t * D, b = Math.min(t + 1, T - 1) * D, c = Math.min(t + 2, T - 1) * D, d = Math.min(t + 3, T - 1) * D;
    for (let o = 0; o < O; o++) {
      let s0 = bias ? bias.data[o] : 0, s1 = s0, s2 = s0, s3 = s0;
      for (let k = 0, row = o * D; k < D; k++) {
        const own = w[row + k];
        s0 += own * x[a + k]; s1 += own * x[b + k]; s2 += own * x[c + k]; s3 += own * x[d + k];
      }
      y[t * O + o] = s0;
      if (t + 1 < T) y[(t + 1) * O + o] = s1;
      if (t + 2 < T) y[(t + 2) * O + o] = s2;
      if (t + 3 < T) y[(t + 3) * O + o] = s3;
    }
  }
  return y;
}

// Layer norm of rows as long as the weight; RMS norm if there is no bias.
function normalise(x, weight, bias, eps) {
  const D = weight.data.length, y = new Float32Array(x.length);
  for (let at = 0; at < x.length; at += D) {
    let mean = 0, variance = 0;
    if (bias) for (let k = 0; k < D; k++) mean += x[at + k] / D;
    for (let k = 0; k < D; k++) variance += (x[at + k] - mean) ** 2 / D;
    const scale = 1 / Math.sqrt(variance + eps);
    for (let k = 0; k < D; k++) y[at + k] = (x[at + k] - mean) * scale * weight.data[k] + (bias ? bias.data[k] : 0);
  }
  return y;
}

function softmax(values) {
  const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const y = Float64Array.from(values, (v) => Math.exp(v - most));
  const sum = y.reduce((a, b) => a + b, 0);
  return y.map((v) => v / sum);
}

// Abramowitz and Stegun 1964, formula 7.1.26; off by less than 1.5e-7.
function erf(z) {
  const t = 1 / (1 + 0.3275911 * Math.abs(z));
  const sum = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(z) * (1 - sum * Math.exp(-z * z));
}

const ACTIVATIONS = {
  relu: (v) => Math.max(0, v),
  relu2: (v) => Math.max(0, v) ** 2,
  tanh: Math.tanh,
  gelu: (v) => 0.5 * v * (1 + erf(v / Math.SQRT2)),
  gelu_tanh: (v) => 0.5 * v * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (v + 0.044715 * v ** 3))),
};
const GATES = { swiglu: (v) => v / (1 + Math.exp(-v)), geglu: ACTIVATIONS.gelu, geglu_tanh: ACTIVATIONS.gelu_tanh };

// f(x), or with a gate f(a) b of the halves a and b of each of the T rows.
function activate(x, T, name) {
  if (!GATES[name]) return x.map(ACTIVATIONS[name]);
  const F = x.length / T / 2, y = new Float32Array(T * F);
  for (let t = 0; t < T; t++) for (let k = 0; k < F; k++) {
    y[t * F + k] = GATES[name](x[2 * t * F + k]) * x[(2 * t + 1) * F + k];
  }
  return y;
}

// Patterns, `layers/patterns.py`: may query i attend to key j?

function hashed(index, seed, link) { // Math.imul multiplies modulo 2^32
  let x = (Math.imul(index, 2654435761) + Math.imul(seed, 40503) + Math.imul(link, 2246822519)) >>> 0;
  for (let round = 0; round < 2; round++) x = Math.imul((x >>> 16) ^ x, 0x45d9f3b) >>> 0;
  return x >>> 1;
}

const PATTERNS = {
  full: () => () => true,
  window: ({ window }) => (i, j) => Math.abs(i - j) < window,
  block: ({ block }) => (i, j) => [0, 1].includes(Math.floor(i / block) - Math.floor(j / block)),
  strided: ({ stride }) => (i, j) => Math.abs(i - j) < stride || (i - j) % stride === 0,
  dilated: ({ window, dilation }) => (i, j) => Math.abs(i - j) < window * dilation && (i - j) % dilation === 0,
  global: ({ window, tokens }) => (i, j) => Math.abs(i - j) < window || i < tokens || j < tokens,
  sinks: ({ window, tokens }) => (i, j) => Math.abs(i - j) < window || j < tokens,
  bigbird: ({ window, tokens, links, seed }) => (i, j) => {
    if (Math.abs(i - j) < window || i < tokens || j < tokens) return true;
    const later = Math.max(i, j), earlier = Math.min(i, j), choices = later - window - tokens + 1;
    const drawn = (link) => tokens + (hashed(later, seed, link) % choices);
    for (let link = 0; choices > 0 && link < links; link++) if (drawn(link) === earlier) return true;
    return false;
  },
};

// Mask of T queries and keys: the pattern, causality, and a CLS token that attends and is attended to everywhere.
function attentionMask(spec, T, causal, hasCls) {
  const allowed = PATTERNS[spec.name](spec), mask = new Uint8Array(T * T);
  for (let i = 0; i < T; i++) for (let j = 0; j < (causal ? i + 1 : T); j++) {
    mask[i * T + j] = allowed(i, j) || (hasCls && (i === 0 || j === 0)) ? 1 : 0;
  }
  return mask;
}

// Positions, `layers/positions.py`: what an encoding does to embeddings (embed), to queries and keys (rotate), and to
// the scores (bias of head n, query i, key j). `get` returns the encoding's trained tensors.

function wavelengths(R, base) { return Array.from({ length: R / 2 }, (_, d) => base ** (2 * d / R)); }

function sinusoid(i, D, base = 10000) { // sine and cosine interleaved, as float32
  return Float32Array.from({ length: D }, (_, k) => (k % 2 ? Math.cos : Math.sin)(i / base ** ((k - (k % 2)) / D)));
}

// RoPE's angles for a text of T tokens: the wavelength of each pair, and a factor on what is rotated.
function ropeWavelengths(spec, T, base) {
  const { R, scaling, factor, length, frequencies, growth } = spec;
  const own = frequencies ? frequencies.map((f) => 1 / f) : wavelengths(R, base);
  if (scaling === "none" || T <= length) return [own, growth];
  if (scaling === "linear") return [own.map((w) => w * factor), growth];
  if (scaling === "ntk") return [wavelengths(R, base * factor ** (R / (R - 2))), growth];
  const mixed = own.map((w) => { // yarn
    const unscaled = Math.min(1, Math.max(0, (length / (2 * Math.PI * w) - 1) / 31));
    return 1 / ((1 - unscaled) / (w * factor) + unscaled / w);
  });
  return [mixed, growth * (0.1 * Math.log(factor) + 1)];
}

const POSITIONS = {
  nope: () => ({}),
  sinusoidal: () => ({
    embed: (x, T, D) => {
      for (let i = 0; i < T; i++) sinusoid(i, D).forEach((value, k) => { x[i * D + k] += value; });
    },
  }),
  learned: (spec, get) => ({
    embed: (x, T, D) => { const table = get("table.weight").data; for (let k = 0; k < T * D; k++) x[k] += table[k]; },
  }),
  alibi: (spec, get, change) => {
    const slopes = slopesOf(spec, get, change);
    return { bias: (n, i, j) => -slopes[n] * Math.abs(i - j) };
  },
  rope: (spec, get, change) => ({
    rotate: (q, k, T, N, H) => {
      const [turns, factor] = ropeWavelengths(spec, T, change.base ?? spec.base);
      for (let i = 0; i < T; i++) for (let d = 0; d < turns.length; d++) {
        const cos = Math.fround(factor * Math.cos(i / turns[d])), sin = Math.fround(factor * Math.sin(i / turns[d]));
        for (let n = 0; n < N; n++) for (const x of [q, k]) {
          const at = (i * N + n) * H + 2 * d, even = x[at], odd = x[at + 1];
          x[at] = even * cos - odd * sin;
          x[at + 1] = even * sin + odd * cos;
        }
      }
    },
  }),
  xpos: (spec, get, change) => {
    const { rotate } = POSITIONS.rope(spec, get, change);
    return {
      rotate: (q, k, T, N, H) => {
        rotate(q, k, T, N, H);
        for (let i = 0; i < T; i++) for (let d = 0; d < N * H; d++) {
          const scale = Math.exp(i * spec.log_decay[d % H]);
          q[i * N * H + d] *= scale;
          k[i * N * H + d] /= scale;
        }
      },
    };
  },
  relative: (spec, get) => {
    const { data: table, shape: [, N] } = get("table.weight"), m = spec.max_distance;
    return { bias: (n, i, j) => table[spec.buckets[Math.max(-m, Math.min(m, i - j)) + m] * N + n] };
  },
  kerple: (spec, get) => {
    const a = get("log_a").data.map(Math.exp), b = get("log_b").data.map(Math.exp);
    return { bias: (n, i, j) => -a[n] * Math.log1p(b[n] * Math.abs(i - j)) };
  },
  fire: (spec, get) => {
    const c = Math.exp(get("log_c").data[0]), threshold = Math.exp(get("log_threshold").data[0]);
    const [w1, b1, w2, b2] = ["0.weight", "0.bias", "2.weight", "2.bias"].map((name) => get("mlp." + name).data);
    return {
      bias: (n, i, j) => {
        const share = Math.log1p(c * Math.abs(i - j)) / Math.log1p(c * Math.max(threshold, i, j));
        return w1.reduce((sum, w, k) => sum + w2[n * w1.length + k] * Math.max(0, w * share + b1[k]), b2[n]);
      },
    };
  },
};

// ALiBi's slope of each head, with the scale.
function slopesOf(spec, get, change) {
  const own = spec.learned ? Array.from(get("log_slopes").data, Math.exp) : spec.slopes;
  return own.map((slope, n) => (change.scale ?? spec.scale) * (change.slopes?.[n] ?? slope));
}

// The encoding of each layer.
function positionsOf(stack, change) {
  const members = stack.positions.members.map((spec) => {
    const get = (name) => stack.get(spec.prefix + name);
    return change.off ? {} : POSITIONS[spec.name](spec, get, change);
  });
  return stack.positions.layers.map((k) => members[k]);
}

// Attention, `layers/attention.py`

// What is added to the scores, [N, T, T], without the mask; null for nothing. `strength` is a factor on it.
function positionalBias(positions, N, T, strength) {
  if (!positions.bias) return null;
  const bias = new Float32Array(N * T * T);
  for (let n = 0; n < N; n++) for (let i = 0; i < T; i++) for (let j = 0; j < T; j++) {
    bias[(n * T + i) * T + j] = strength * positions.bias(n, i, j);
  }
  return bias;
}

// softmax(q k^T / sqrt(H) + bias) v, where the mask allows; heads that are switched off give 0.
function attention(q, k, v, { T, S, N, H, bias, mask, isOff }) {
  const weights = new Float32Array(N * T * S), output = new Float32Array(T * N * H), D = N * H, root = Math.sqrt(H);
  const scores = new Float64Array(S);
  const off = Array.from({ length: N }, (_, n) => isOff(n));
  for (let n = 0; n < N; n++) for (let i = 0; i < T; i++) {
    let most = -Infinity, sum = 0;
    const row = (n * T + i) * S;
    for (let j = 0; j < S; j++) {
      if (mask && !mask[i * S + j]) { scores[j] = -Infinity; continue; }
      let dot = 0;
      for (let d = 0, a = i * D + n * H, b = j * D + n * H; d < H; d++) dot += q[a + d] * k[b + d];
      scores[j] = dot / root + (bias ? bias[row + j] : 0);
      if (scores[j] > most) most = scores[j];
    }
    for (let j = 0; j < S; j++) sum += scores[j] = Math.exp(scores[j] - most);
    for (let j = 0; j < S; j++) {
      const weight = weights[row + j] = scores[j] / sum;
      if (weight && !off[n]) for (let d = 0; d < H; d++) output[i * D + n * H + d] += weight * v[j * D + n * H + d];
    }
  }
  return { output, weights };
}

// The parts of a projection with rows of as many heads as `counts` says, with N heads each: a head of keys or values
// serves several of queries.
function unbind(x, T, N, H, ...counts) {
  const width = x.length / T;
  let from = 0;
  return counts.map((count) => {
    const own = new Float32Array(T * N * H);
    for (let t = 0; t < T; t++) for (let n = 0; n < N; n++) {
      const at = t * width + (from + Math.floor(n * count / N)) * H;
      own.set(x.subarray(at, at + H), (t * N + n) * H);
    }
    from += count;
    return own;
  });
}

// x + f(norm(x)), norm(x + f(x)) or x + norm'(f(norm(x))): `layers/block.py`. f may read another x.
function residual({ order, norm }, x, block, name, index, branch, input = x) {
  let out = branch(order === "post" ? input : norm(input, block + name));
  if (order === "sandwich") out = norm(out, `${block}output_norms.${index}`);
  for (let k = 0; k < out.length; k++) out[k] += x[k];
  return order === "post" ? norm(out, block + name) : out;
}

// A stack of blocks, `models/stack.py`: ids -> states, and for each layer what its attention did.
function runStack(model, part, ids, change, memory = null) {
  const { width: D, heads: N, kvHeads, headWidth: H, causal, hasCls, positions: encodings } = model.parts[part];
  const get = (name) => model.tensors.get(`${part}.${name}`);
  const project = (y, rows, name) => linear(y, rows, get(name + ".weight"), get(name + ".bias"));
  const norm = (y, name, eps = model.eps) => normalise(y, get(name + ".weight"), get(name + ".bias"), eps);
  const stack = { get, norm, order: model.norm, positions: encodings }, T = ids.length + (hasCls ? 1 : 0);
  const positions = positionsOf(stack, change), attended = [], crossed = [];
  let x = new Float32Array(T * D);
  const table = get("embedding.weight").data;
  ids.forEach((id, t) => x.set(table.subarray(id * D, (id + 1) * D), (t + (hasCls ? 1 : 0)) * D));
  if (model.scale !== 1) x = x.map((value) => value * model.scale);
  if (hasCls) x.set(get("first_token.weight").data);
  positions[0].embed?.(x, T, D);
  if (get("embedding_norm.weight")) x = norm(x, "embedding_norm");
  const masks = new Map(), biases = new Map();
  const isOff = (kind, layer) => (n) => change.heads.includes(`${kind}.${layer}.${n}`);
  for (let layer = 0; layer < kvHeads.length; layer++) {
    const block = `blocks.${layer}.`, spec = change.pattern ?? model.patterns[layer], own = positions[layer];
    if (!masks.has(spec)) masks.set(spec, attentionMask(spec, T, causal, hasCls));
    if (!biases.has(own)) biases.set(own, positionalBias(own, N, T, change.strength ?? 1));
    const input = x;
    x = residual(stack, x, block, "attention_norm", 0, (y) => {
      const K = kvHeads[layer], name = block + "attention.";
      let [q, k, v] = unbind(project(y, T, name + "qkv"), T, N, H, N, K, K);
      if (get(name + "q_norm.weight")) {
        [q, k] = [norm(q, name + "q_norm", model.qkEps), norm(k, name + "k_norm", model.qkEps)];
      }
      own.rotate?.(q, k, T, N, H);
      const shape = { T, S: T, N, H, bias: biases.get(own), mask: masks.get(spec), isOff: isOff(part, layer) };
      const { output, weights } = attention(q, k, v, shape);
      attended.push({ q, k, v, weights, ...shape });
      return project(output, T, name + "output");
    });
    if (memory) x = residual(stack, x, block, "cross_attention_norm", 2, (y) => {
      const name = block + "cross_attention.", S = memory.T;
      const q = project(y, T, name + "q");
      const [k, v] = unbind(project(memory.x, S, name + "kv"), S, N, H, N, N);
      const shape = { T, S, N, H, bias: null, mask: null, isOff: isOff("cross", layer) };
      const { output, weights } = attention(q, k, v, shape);
      crossed.push({ q, k, v, weights, ...shape });
      return project(output, T, name + "output");
    });
    x = residual(stack, x, block, "feed_forward_norm", 1, (y) => {
      const hidden = activate(project(y, T, block + "feed_forward.0"), T, model.activation);
      return project(hidden, T, block + "feed_forward.2");
    }, model.norm === "parallel" ? input : x);
  }
  if (model.finalNorm) x = norm(x, "final_norm");
  return { x, T, D, attended, crossed };
}

// Models, `models/`

// A run's model: its description (`play_page.py` writes it) and the tensors of one checkpoint.
function makeModel(spec, tensors) { return { ...spec, tensors }; }

// Logits of the states in rows `from` and later: [rows, V], or of a classifier [1, classes].
function logitsOf(model, states, from = 0) {
  const { x, T, D } = states, get = (name) => model.tensors.get(name);
  if (model.task !== "classify") {
    return linear(x.subarray(from * D), T - from, get("output.weight"), get("output.bias"));
  }
  const rows = model.pool === "mean" ? T : 1, pooled = new Float32Array(D); // of all tokens, or the first
  for (let t = 0; t < rows; t++) for (let k = 0; k < D; k++) pooled[k] += x[t * D + k] / rows;
  const hidden = linear(pooled, 1, get("head.0.weight"), get("head.0.bias")).map(ACTIVATIONS[model.headActivation]);
  return linear(hidden, 1, get("head.2.weight"), get("head.2.bias"));
}

// Run a model on ids (a translator: on source and target ids); the states, and the attention of each part.
function forward(model, inputs, change = UNCHANGED) {
  if (model.task !== "translate") {
    const part = model.task === "classify" ? "encoder" : "decoder";
    const states = runStack(model, part, inputs[0], change);
    return { states, parts: { [part]: states.attended } };
  }
  const encoder = runStack(model, "encoder", inputs[0], change);
  const states = runStack(model, "decoder", inputs[1], change, encoder);
  return { states, parts: { encoder: encoder.attended, decoder: states.attended, cross: states.crossed } };
}

// Mean negative log-likelihood of the next token over a text, in nats; null for fewer than two tokens.
function nextTokenLoss(logits, ids) {
  const V = logits.length / ids.length;
  let loss = 0;
  for (let t = 0; t + 1 < ids.length; t++) {
    loss += negativeLogLikelihood(logits.subarray(t * V, (t + 1) * V), ids[t + 1]);
  }
  return ids.length < 2 ? null : loss / (ids.length - 1);
}

function negativeLogLikelihood(logits, target) {
  let most = -Infinity, sum = 0;
  for (const value of logits) if (value > most) most = value;
  for (const value of logits) sum += Math.exp(value - most);
  return most + Math.log(sum) - logits[target];
}

// Scores of a head from its weights: attention to the previous token, to the first, and to the token after an earlier
// occurrence of the query's token (induction; Olsson et al. 2022). Means over the queries that have one, else null.
function headScores(weights, n, T, tokens) {
  const at = (i, j) => weights[(n * T + i) * T + j], earlier = [];
  let previous = 0, first = 0, entropy = 0, distance = 0;
  for (let i = 0; i < T; i++) {
    if (i) { previous += at(i, i - 1); first += at(i, 0); }
    for (let j = 0; j < T; j++) {
      if (at(i, j) > 0) entropy -= at(i, j) * Math.log(at(i, j)) / T;
      distance += at(i, j) * Math.abs(i - j) / T;
    }
    const after = [];
    for (let p = 0; p + 1 < i; p++) if (tokens[p] === tokens[i]) after.push(at(i, p + 1));
    if (after.length) earlier.push(after.reduce((a, b) => a + b, 0));
  }
  const induction = earlier.length ? earlier.reduce((a, b) => a + b, 0) / earlier.length : null;
  const mean = (sum) => T > 1 ? sum / (T - 1) : null;
  return { previous: mean(previous), first: mean(first), induction, entropy, distance };
}

// The seeded random numbers in [0, 1) of sampling (mulberry32).
function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 4294967296;
  };
}

// Draw the next token: p ~ exp(logit / temperature); 0 takes the most probable. Padding is never drawn.
function drawToken(logits, temperature, random, words, padding = 0) {
  const known = Array.from(logits.subarray(0, words), (value, id) => id === padding ? -Infinity : value);
  if (temperature === 0) return known.reduce((best, value, id) => value > known[best] ? id : best, 0);
  let rest = random();
  const probabilities = softmax(known.map((value) => value / temperature));
  for (let id = 0; id < known.length; id++) if ((rest -= probabilities[id]) < 0) return id;
  return known.length - 1;
}
