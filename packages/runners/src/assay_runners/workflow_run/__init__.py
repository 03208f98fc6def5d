"""Inside of a workflow run: reads its event, writes its outputs and summary, asks GitHub."""
