// The permissions of a job's token. null stands for the repository's settings.

import { resolve } from "./expressions.mjs";
import { InputError } from "./files.mjs";

const LEVELS = ["none", "read", "write"];

/** Reads the declared permissions, without "none"; undefined if there are none. */
export function readPermissions(token) {
  const declared = resolve(token, {});
  if (typeof declared === "string") {
    throw new InputError(`permissions are ${declared}, which none of our workflows has`);
  }
  return declared && keepAbove(Object.entries(declared));
}

/** Takes the lower level of both for each scope: a called workflow gets at most its caller's. */
export function narrow(own, ceiling) {
  if (own === null || ceiling === null) {
    return own ?? ceiling;
  }
  return keepAbove(
    Object.entries(own).map(([scope, level]) => [scope, lower(level, ceiling[scope] ?? "none")]),
  );
}

/** Finds the levels above the ceiling, such as "contents: write": GitHub refuses such a workflow. */
export function findExcess(own, ceiling) {
  return Object.entries(ceiling === null ? {} : (own ?? {}))
    .filter(([scope, level]) => lower(level, ceiling[scope] ?? "none") !== level)
    .map(([scope, level]) => `${scope}: ${level}`);
}

function keepAbove(entries) {
  return Object.fromEntries(entries.filter(([, level]) => level !== "none"));
}

function lower(one, other) {
  return LEVELS[Math.min(LEVELS.indexOf(one), LEVELS.indexOf(other))];
}
