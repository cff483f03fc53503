// Runs in the guest, QuickJS, as a module: executes the code that stdin holds and writes what became of it to
// /dev/result. Nothing here is protected from that code; whatever it makes of it, the node reads with suspicion.
const { std, os, JSON, Uint8Array, Map, String, Error, Object, Array, btoa } = globalThis;
const request = JSON.parse(std.in.readAsString());
const stringify = JSON.stringify;
const written = new Map();
const TEXT_MAX = 4000;

const pathOf = (path) => String(path).replace(/^(\.?\/)+/, "");

globalThis.readFile = (path) => {
  const name = pathOf(path);
  const value = written.has(name) ? written.get(name) : std.loadFile("/" + name);
  if (value === null) throw new Error("there is no file " + name);
  return value;
};
globalThis.readBytes = (path) => {
  const name = pathOf(path);
  if (written.has(name)) {
    const value = written.get(name);
    return typeof value === "string" ? encode(value) : value;
  }
  const value = std.loadFile("/" + name, { binary: true });
  if (value === null) throw new Error("there is no file " + name);
  return value;
};
globalThis.writeFile = (path, value) => {
  written.set(pathOf(path), value instanceof Uint8Array ? value.slice() : String(value));
};
let [a, b, c, d] = request.seed; // xorshift128
Math.random = () => {
  const t = a ^ (a << 11);
  [a, b, c] = [b, c, d];
  d = d ^ (d >>> 19) ^ t ^ (t >>> 8);
  return (d >>> 0) / 4294967296;
};
for (const [name, value] of Object.entries(request.variables)) globalThis[name] = value;
for (const name of ["setTimeout", "clearTimeout", "setInterval", "clearInterval"]) globalThis[name] = os[name];
delete globalThis.std;
delete globalThis.os;
delete globalThis.bjson;
console.error = console.warn = (...what) => std.err.puts(what.join(" ") + "\n");

function encode(text) {
  const bytes = unescape(encodeURIComponent(text));
  return Uint8Array.from(bytes, (c) => c.charCodeAt(0));
}

function base64(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return btoa(text);
}

function shown(value) {
  let text;
  try {
    // not String, which looks into arrays, however deep
    text = typeof value === "object" ? Object.prototype.toString.call(value) : String(value);
  } catch {
    text = "<" + typeof value + ">";
  }
  return text.slice(0, TEXT_MAX);
}

function errorOf(error) {
  const is = error instanceof Error;
  const type = is ? shown(error.name) : typeof error;
  const message = is ? shown(error.message) : shown(error);
  let kind = type === "SyntaxError" ? "syntax" : "raised";
  if (type === "InternalError" || type === "RangeError") {
    if (/out of memory/.test(message)) kind = "memory";
    else if (/stack/.test(message)) kind = "stack";
  }
  return { kind, type, message, traceback: is && error.stack ? shown(error.stack) : "" };
}

function answerOf(value) {
  let text;
  try {
    text = stringify(value === undefined ? null : value);
  } catch (error) {
    if (error.name === "InternalError") throw error; // no memory
  }
  return text === undefined ? '{"repr":' + stringify(shown(value)) : '{"value":' + text;
}

let answer;
try {
  const done = await std.evalScript(request.code, { async: true });
  answer = answerOf(done.value instanceof Promise ? await done.value : done.value);
} catch (error) {
  answer = '{"error":' + stringify(errorOf(error));
}
if (written.size) {
  const files = {};
  for (const [path, value] of written) files[path] = typeof value === "string" ? value : { base64: base64(value) };
  answer += ',"files":' + stringify(files);
}
answer += "}";
if (answer.length > request.result_bytes) { // characters; the node counts bytes
  const message = "value and files have more than " + request.result_bytes + " bytes as JSON";
  answer = stringify({ error: { kind: "result", type: "", message, traceback: "" } });
}
const result = std.open("/dev/result", "w");
result.puts(answer);
result.close();
