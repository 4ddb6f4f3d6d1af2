// The engine in a browser, or in anything else with WebAssembly and fetch: one module instance holds one model.
//
//     const model = await Colibri.load("engine.wasm", "model.bin");
//     const outputs = model.forward(rows); // Float32Array (batch, inputSize) -> (batch, outputSize)
//     model.routes[0];                     // experts chosen by the first MoE layer, (batch, tokens, k)

const ALIGN = 64; // bytes: what the engine asks of a model and of a context
const PAGE = 65536; // bytes of a page of WebAssembly's memory
const CHECK_WEIGHTS = 1; // enum colibri_depth
const FIELD = { status: 0, maxBatch: 1, inputSize: 2, outputSize: 3 }; // colibri_context_t, in words of 4 bytes

/** What the engine refused: `code` is its enum colibri_error, `name` says it in letters. */
export class ColibriError extends Error {
  constructor(code, name, text) {
    super(text);
    this.code = code;
    this.name = name;
  }
}

export class Colibri {
  /** Fetch the engine and a model. Throws ColibriError for a bad model, Error for what cannot be fetched. */
  static async load(engineUrl, modelUrl) {
    const [engine, model] = await Promise.all([fetchBytes(engineUrl), fetchBytes(modelUrl)]);
    return Colibri.open(engine, model);
  }

  /** The same from the bytes of both, as ArrayBuffer or Uint8Array. */
  static async open(engine, model) {
    let colibri = null;
    const imports = { colibri: { on_route: (...call) => colibri.#onRoute(...call) } };
    const { instance } = await WebAssembly.instantiate(engine, imports);
    colibri = new Colibri(instance.exports, new Uint8Array(model));
    return colibri;
  }

  #engine;
  #context;
  #fields;
  #input;
  #output;

  /** Not for callers, who use load or open. */
  constructor(engine, model) {
    this.#engine = engine;
    this.routes = [];
    let end = engine.__heap_base.value;
    const place = (bytes) => {
      const start = Math.ceil(end / ALIGN) * ALIGN;
      end = start + bytes;
      const missing = end - engine.memory.buffer.byteLength;
      if (missing > 0) {
        try {
          engine.memory.grow(Math.ceil(missing / PAGE));
        } catch {
          throw new Error(`This browser has no ${missing} bytes of memory more, which the model needs.`);
        }
      }
      return start;
    };
    const bytes = place(model.length);
    new Uint8Array(engine.memory.buffer).set(model, bytes);
    // The engine trusts a length only here; whoever skips this must know that the file is whole.
    this.#require(engine.colibri_check(bytes, model.length, CHECK_WEIGHTS));
    this.modelBytes = model.length;
    this.contextBytes = engine.colibri_model_size(bytes) >>> 0;
    this.experts = engine.colibri_get_num_experts(bytes);
    this.version = this.#text(engine.colibri_version());
    const memory = place(this.contextBytes);
    if (engine.colibri_init(memory, this.contextBytes, bytes) === 0) {
      this.#require(engine.colibri_diagnose(memory, this.contextBytes, bytes));
    }
    this.#context = memory;
    engine.watch_routes(this.#context);
    const field = (name) => new Int32Array(engine.memory.buffer, this.#context)[FIELD[name]];
    this.maxBatch = field("maxBatch");
    this.inputSize = field("inputSize");
    this.outputSize = field("outputSize");
    const [input, output] = [this.inputSize, this.outputSize].map((size) => place(4 * size * this.maxBatch));
    // Views last: growing the memory detaches those made before.
    this.#fields = new Int32Array(engine.memory.buffer, this.#context, 4);
    this.#input = new Float32Array(engine.memory.buffer, input, this.inputSize * this.maxBatch);
    this.#output = new Float32Array(engine.memory.buffer, output, this.outputSize * this.maxBatch);
  }

  /** Recompute the certificate that the model carries; throws ColibriError where a bit differs. */
  selftest() {
    this.#require(this.#engine.colibri_selftest(this.#context, this.#output.byteOffset));
  }

  /** Outputs (batch, outputSize) for `rows` (batch, inputSize), any number of them; `routes` then holds the choices. */
  forward(rows) {
    const batch = rows.length / this.inputSize;
    if (!Number.isInteger(batch)) {
      throw new Error(`${rows.length} numbers are not rows of ${this.inputSize}, which this model takes`);
    }
    const outputs = new Float32Array(batch * this.outputSize);
    this.routes = [];
    for (let first = 0; first < batch; first += this.maxBatch) {
      const count = Math.min(this.maxBatch, batch - first);
      this.#input.set(rows.subarray(first * this.inputSize, (first + count) * this.inputSize));
      this.#engine.colibri_forward(this.#context, this.#input.byteOffset, this.#output.byteOffset, count);
      this.#require(this.#fields[FIELD.status]);
      outputs.set(this.#output.subarray(0, count * this.outputSize), first * this.outputSize);
    }
    return outputs;
  }

  #onRoute(user, layer, experts, tokens, k) {
    const chosen = new Int32Array(this.#engine.memory.buffer, experts >>> 0, tokens * k);
    (this.routes[layer] ??= []).push(...chosen);
  }

  #require(error) {
    if (error === 0) return;
    const { colibri_error_name: name, colibri_error_text: text } = this.#engine;
    throw new ColibriError(error, this.#text(name(error)), this.#text(text(error)));
  }

  #text(start) {
    const bytes = new Uint8Array(this.#engine.memory.buffer, start);
    return new TextDecoder().decode(bytes.subarray(0, bytes.indexOf(0)));
  }
}

/** The bytes at a URL; throws Error with the reason. */
export async function fetchBytes(url) {
  // A new model under the old name must be seen; the server says whether it has changed.
  const answer = await fetch(url, { cache: "no-cache" });
  if (!answer.ok) throw new Error(`${url} cannot be fetched: ${answer.status} ${answer.statusText}`.trim());
  return new Uint8Array(await answer.arrayBuffer());
}

/** FNV-1a, 32 bits, of the bytes of a typed array. */
export function fnv1a(array) {
  let digest = 2166136261;
  for (const byte of new Uint8Array(array.buffer, array.byteOffset, array.byteLength)) {
    digest = Math.imul(digest ^ byte, 16777619);
  }
  return digest >>> 0;
}
