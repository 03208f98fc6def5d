// Reads workflow files with GitHub's own package.

import {
  convertWorkflowTemplate,
  isMapping,
  NoOperationTraceWriter,
  parseWorkflow,
} from "@actions/workflow-parser";

const SAME_COMMIT = /^[.$]\/(\.github\/workflows\/[^/@]+)$/;
const ANY_COMMIT = /^([^/@]+\/[^/@]+)\/(\.github\/workflows\/[^/@]+)@(.+)$/;

/** The input is invalid, and the program ends. */
export class InputError extends Error {}

/**
 * Parses all files of the input. Returns: the files, and a function that finds the file of a `uses`.
 *
 * workflows: texts, by file name.
 * reusable: texts, by the value of `uses`.
 * Throws: InputError with all messages of the parser.
 */
export async function parseFiles({ workflows, reusable = {} }) {
  const messages = [];
  const own = await parseAll(workflows, messages);
  const others = await parseAll(reusable, messages);
  if (messages.length > 0) {
    throw new InputError(messages.join("\n"));
  }
  return { own, find: (uses, caller, repository) => find(uses, caller, repository, own, others) };
}

function find(uses, caller, repository, own, others) {
  const [, local] = SAME_COMMIT.exec(uses) ?? [];
  const [, named, path = local] = ANY_COMMIT.exec(uses) ?? [];
  // The files of the repository itself stand for any commit of it.
  const isOwn =
    path &&
    (named ?? repository).toLowerCase() === repository.toLowerCase() &&
    !(local && Object.values(others).includes(caller));
  const found = others[uses] ?? (isOwn ? own[path.split("/").at(-1)] : undefined);
  if (!found) {
    throw new InputError(`${caller.file} uses ${uses}, which is not given`);
  }
  if (!Object.hasOwn(found.events, "workflow_call")) {
    throw new InputError(`${caller.file} uses ${uses}, which has no workflow_call`);
  }
  return found;
}

async function parseAll(texts, messages) {
  const parsed = {};
  for (const [file, content] of Object.entries(texts)) {
    const { context, value: root } = parseWorkflow(
      { name: file, content },
      new NoOperationTraceWriter(),
    );
    const { errors = [], events, jobs } = await convertWorkflowTemplate(context, root);
    messages.push(
      ...errors.map(({ Message: text }) => (text.includes(file) ? text : `${file}: ${text}`)),
    );
    parsed[file] = errors.length > 0 ? undefined : { file, root, events, jobs };
  }
  return parsed;
}

/** Finds the token at `keys`; undefined if there is none. */
export function findToken(token, ...keys) {
  return keys.reduce(
    (inner, key) => (inner !== undefined && isMapping(inner) ? inner.find(key) : undefined),
    token,
  );
}
