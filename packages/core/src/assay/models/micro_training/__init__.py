"""Train the micro models (`assay models build`)."""
