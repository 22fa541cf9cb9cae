"""Translation of other frameworks' configurations into settings of this project."""
