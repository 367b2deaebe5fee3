"""Complete workloads that ship with whet. Configs and plans of a recipe do not need torch."""
