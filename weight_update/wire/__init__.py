"""Wire format: schemas, frames and the checks of what was received."""
