// node generate.mjs --endpoint ENDPOINT [--prompt TEXT]… [--prompt-ids 1,2,3]… [--max-tokens N]
// Completes all prompts together on the gang, and prints a JSON line for each.
import { parseArgs } from "node:util";
import { Lease } from "./lease.mjs";
import { Scheduler } from "./scheduler.mjs";
import { Tokenizer } from "./text.mjs";

const { values } = parseArgs({
  options: {
    endpoint: { type: "string" },
    prompt: { type: "string", multiple: true, default: [] },
    "prompt-ids": { type: "string", multiple: true, default: [] },
    "max-tokens": { type: "string", default: "16" },
  },
});

let tokenizer = null;
const requests = [];

function start(facts) {
  if (values.prompt.length) tokenizer = new Tokenizer(facts.model);
  const scheduler = new Scheduler(facts, tokenizer?.stops ?? new Set());
  const prompts = values.prompt.map((text) => tokenizer.encode(text));
  prompts.push(...values["prompt-ids"].map((ids) => ids.split(",").map(Number)));
  requests.push(...prompts.map((prompt) => scheduler.add(prompt, Number(values["max-tokens"]))));
  return scheduler;
}

try {
  await new Lease(values.endpoint, "node").run(start);
  for (const { tokens, prompt } of requests) {
    const text = tokenizer ? { text: tokenizer.decode(tokens) } : {};
    console.log(JSON.stringify({ tokens: tokens.slice(prompt), ...text }));
  }
} catch (error) {
  console.error(`generate: ${error.message}`);
  process.exitCode = 1;
}
