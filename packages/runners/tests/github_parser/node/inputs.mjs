// The inputs of a workflow that was started by hand or called by another one.

import { JobError, toText } from "./expressions.mjs";

const EMPTY = { string: "", boolean: false, number: 0 };

/**
 * Reads the `inputs` of a workflow that was started by hand.
 *
 * declared: the inputs of on.workflow_dispatch, by name.
 * given: strings, by name, from the payload of the event.
 */
export function readDispatchInputs(declared, given) {
  refuseUndeclared(declared, given);
  return mapDeclared(declared, (name, { default: otherwise }) => toText(given[name] ?? otherwise));
}

/**
 * Reads the `inputs` of a called workflow.
 *
 * declared: the inputs of on.workflow_call, by name, with their defaults evaluated.
 * given: the values of `with`, by name.
 */
export function readCallInputs(declared, given) {
  refuseUndeclared(declared, given);
  return mapDeclared(declared, (name, { type, required, default: otherwise }) => {
    if (required && !(name in given)) {
      throw new JobError(`the input ${name} is required, and not given`);
    }
    const value = given[name] ?? otherwise ?? EMPTY[type];
    if (type === "string") {
      return toText(value);
    }
    // GitHub converts a number to a string, but only fromJSON converts a string to a number.
    if (typeof value !== type) {
      throw new JobError(
        `the input ${name} is ${JSON.stringify(value)}, and a ${type} is expected`,
      );
    }
    return value;
  });
}

function mapDeclared(declared, read) {
  return Object.fromEntries(
    Object.entries(declared).map(([name, one]) => [name, read(name, one ?? {})]),
  );
}

function refuseUndeclared(declared, given) {
  const name = Object.keys(given).find((one) => !Object.hasOwn(declared, one));
  if (name !== undefined) {
    throw new JobError(`the input ${name} is not declared`);
  }
}
