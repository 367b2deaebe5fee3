"""The recipes that ship with whet. Reading a recipe's config and planning it do not require torch."""
