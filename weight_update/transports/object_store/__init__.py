"""Transport through an object store: a sender publishes versions, and any number of receivers read them."""
