"""The processes of a world: fork server, leader of the group, ranks, and their pipes."""
