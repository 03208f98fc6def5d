// What the token of a job may do. null stands for what the repository's settings say.

import { getWorkflowSchema } from "@actions/workflow-parser/workflows/workflow-schema";

import { resolve } from "./expressions.mjs";

const LEVELS = ["none", "read", "write"];

/** What a token of a workflow file declares, without what is "none"; undefined if it is absent. */
export function readPermissions(token) {
  const declared = resolve(token, {});
  if (declared === "read-all" || declared === "write-all") {
    const level = declared.replace("-all", "");
    return Object.fromEntries(allScopes().map((scope) => [scope, level]));
  }
  return declared && keepAbove(Object.entries(declared));
}

/** The lower level of both, scope by scope: a called workflow gets no more than its caller has. */
export function narrow(own, ceiling) {
  if (own === null || ceiling === null) {
    return own ?? ceiling;
  }
  return keepAbove(
    Object.entries(own).map(([scope, level]) => [scope, lower(level, ceiling[scope] ?? "none")]),
  );
}

/** What is declared beyond the ceiling, as in "contents: write": GitHub refuses such a workflow. */
export function findExcess(own, ceiling) {
  return Object.entries(ceiling === null ? {} : (own ?? {}))
    .filter(([scope, level]) => lower(level, ceiling[scope] ?? "none") !== level)
    .map(([scope, level]) => `${scope}: ${level}`);
}

/** What is left for a pull request from a fork: GitHub makes every "write" a "read". */
export function withoutWriting(own) {
  return (
    own &&
    keepAbove(
      Object.entries(own)
        // An identity is written or not there at all.
        .filter(([scope]) => scope !== "id-token")
        .map(([scope, level]) => [scope, lower(level, "read")]),
    )
  );
}

function keepAbove(entries) {
  return Object.fromEntries(entries.filter(([, level]) => level !== "none"));
}

function lower(one, other) {
  return LEVELS[Math.min(LEVELS.indexOf(one), LEVELS.indexOf(other))];
}

function allScopes() {
  return Object.keys(getWorkflowSchema().definitions["permissions-mapping"].properties);
}
