// The gang's states, and what may come next: the table of section 7 of proto/SPEC.md.
const ANY_TIME = ["STOPPING", "FAILED"]; // until it ends

const NEXT = {
  STARTING: ["ROLL_CALL", ...ANY_TIME],
  ROLL_CALL: ["LOADING", ...ANY_TIME],
  LOADING: ["PROFILING", ...ANY_TIME],
  PROFILING: ["AWAITING_KV", "WARMING", ...ANY_TIME],
  AWAITING_KV: ["WARMING", ...ANY_TIME],
  WARMING: ["READY", ...ANY_TIME],
  READY: ["ASLEEP", "UPDATING", "DRAINING", ...ANY_TIME],
  ASLEEP: ["READY", "UPDATING", "DRAINING", ...ANY_TIME],
  UPDATING: ["READY", "ASLEEP", "DRAINING", ...ANY_TIME],
  DRAINING: ANY_TIME,
  STOPPING: ["STOPPED"],
  STOPPED: [],
  FAILED: ["STARTING"],
};

/** Whether an Event may tell of `next` after `state`; of the same state again where an operation has changed nothing. */
export const follows = (state, next) => next in NEXT && (next === state || NEXT[state].includes(next));
