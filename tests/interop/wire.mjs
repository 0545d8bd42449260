// Frames of the wire: sections 3 to 6 of proto/SPEC.md, as far as a scheduler needs them.
import { decode, encode } from "@msgpack/msgpack";

export const Kind = {
  HELLO: 1, WELCOME: 2, ERROR: 3, PING: 4, PONG: 5, BYE: 6, EVENT: 7, STEP: 16, RESULT: 32, REFUSED: 33,
};
export const RESYNC = 2; // header flag
export const SAMPLE = 1; // row flag

const HEADER_BYTES = 24;
const RECEIVED = [Kind.WELCOME, Kind.ERROR, Kind.PING, Kind.PONG, Kind.BYE, Kind.EVENT, Kind.RESULT, Kind.REFUSED];

// Maps that a scheduler receives: every field, and what it is; "?" marks one that may be null.
const COUNT = (value) => Number.isInteger(value) && value >= 0 && value <= Number.MAX_SAFE_INTEGER;
const TEXT = (value) => typeof value === "string";
const BOOL = (value) => typeof value === "boolean";
const LIST = (member) => (value) => Array.isArray(value) && value.every(member);
const OPTIONAL = (type) => (value) => value === null || type(value);
const MAP = (fields, required) => (value) =>
  value !== null && typeof value === "object" && Object.getPrototypeOf(value) === Object.prototype &&
  Object.entries(value).every(([name, member]) => Object.hasOwn(fields, name) && fields[name](member)) &&
  required.every((name) => name in value);

const all = (fields) => MAP(fields, Object.keys(fields));
const LEDGER = (value) =>
  value !== null && typeof value === "object" && Object.values(value).every(Number.isSafeInteger);
const CACHE = all({
  num_blocks: COUNT, block_size: COUNT, dtype: TEXT, layout: TEXT, block_bytes: LIST(COUNT), available_bytes: LIST(COUNT),
  hash_block_size: COUNT, alignment: COUNT,
});
const LIMITS = all({
  steps_in_flight: COUNT, tokens: COUNT, rows: COUNT, live_requests: COUNT, frame_bytes: COUNT, logprobs: COUNT,
});
const FACTS = all({
  model: TEXT, vocabulary: COUNT, max_model_len: COUNT, weights_id: TEXT, weights_valid: BOOL, kv: CACHE, tp: COUNT,
  pp: COUNT, limits: LIMITS, memory: LIST(LEDGER),
});
const FAULT = MAP({
  code: COUNT, rank: OPTIONAL(COUNT), phase: TEXT, step: OPTIONAL(COUNT), signal: OPTIONAL(TEXT), message: TEXT,
  traceback: TEXT,
}, ["code"]);
const BODIES = {
  [Kind.WELCOME]: MAP({
    state: TEXT, lease_timeout_ms: COUNT, features: LIST(TEXT), requests_dropped: COUNT, facts: OPTIONAL(FACTS),
  }, ["state", "lease_timeout_ms"]),
  [Kind.ERROR]: MAP({
    code: TEXT, seq: COUNT, expected_seq: OPTIONAL(COUNT), field: TEXT, value: TEXT, bound: TEXT, message: TEXT,
  }, ["code"]),
  [Kind.BYE]: MAP({ code: TEXT, message: TEXT }, []),
  [Kind.EVENT]: MAP({
    state: TEXT, epoch: COUNT, last_answered: COUNT, facts: OPTIONAL(FACTS), fault: OPTIONAL(FAULT),
  }, ["state", "epoch"]),
  [Kind.REFUSED]: MAP({
    code: TEXT, cause_seq: COUNT, request: OPTIONAL(COUNT), field: TEXT, value: TEXT, bound: TEXT, message: TEXT,
  }, ["code", "cause_seq"]),
};

/** The peer does not keep to the spec: the lease must be ended. */
export class WireError extends Error {}

export function header(kind, { flags = 0, epoch = 0, lease, seq = 0 }) {
  const frame = Buffer.alloc(HEADER_BYTES);
  frame.write("RNKD", 0, "latin1");
  frame.writeUInt8(1, 4);
  frame.writeUInt8(kind, 5);
  frame.writeUInt16LE(flags, 6);
  frame.writeUInt32LE(epoch, 8);
  frame.writeUInt32LE(lease, 12);
  frame.writeBigUInt64LE(BigInt(seq), 16);
  return frame;
}

export const body = (value) => Buffer.from(encode(value));

/** One message, judged: {kind, epoch, lease, seq, message}. Throws WireError. */
export function read(frames) {
  if (frames.length !== 2) throw new WireError(`a message of ${frames.length} frames`);
  const [head, rest] = frames;
  if (head.length !== HEADER_BYTES || head.toString("latin1", 0, 4) !== "RNKD") throw new WireError("no header");
  if (head.readUInt8(4) !== 1) throw new WireError(`version ${head.readUInt8(4)}`);
  const kind = head.readUInt8(5);
  const seq = Number(head.readBigUInt64LE(16));
  if (!RECEIVED.includes(kind)) throw new WireError(`kind ${kind} is not for a scheduler`);
  if (head.readUInt16LE(6) !== 0) throw new WireError("flags on what is no step");
  if (seq > Number.MAX_SAFE_INTEGER) throw new WireError("a sequence of 2^53 or more");
  const message = kind === Kind.RESULT ? readResult(rest) : readMap(kind, rest);
  return { kind, epoch: head.readUInt32LE(8), lease: head.readUInt32LE(12), seq, message };
}

function unpacked(kind, frame) {
  try {
    return decode(frame);
  } catch (error) {
    throw new WireError(`the body of kind ${kind} is no msgpack object: ${error.message}`);
  }
}

function readMap(kind, frame) {
  if (kind === Kind.PING || kind === Kind.PONG) {
    if (frame.length) throw new WireError("a ping with a body");
    return null;
  }
  const message = unpacked(kind, frame);
  if (!BODIES[kind](message)) throw new WireError(`the body of kind ${kind} is not as the spec says`);
  return message;
}

/** The tokens of a Result; the rest is judged and left. */
function readResult(frame) {
  const members = unpacked(Kind.RESULT, frame);
  const packed = (value) => value instanceof Uint8Array && value.length % 4 === 0;
  const types = [packed, COUNT, packed, packed, packed, packed];
  const right = Array.isArray(members) && members.length <= types.length && members.every((m, i) => types[i](m));
  if (!right) throw new WireError("the body of a Result is not as the spec says");
  return { tokens: integers(members[0] ?? new Uint8Array()) };
}

/** int32, little-endian, whatever the machine and the alignment. */
export function pack(values) {
  const bytes = Buffer.alloc(4 * values.length);
  values.forEach((value, place) => bytes.writeInt32LE(value, 4 * place));
  return new Uint8Array(bytes);
}

function integers(bytes) {
  const view = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Array.from({ length: view.length / 4 }, (_, place) => view.readInt32LE(4 * place));
}
