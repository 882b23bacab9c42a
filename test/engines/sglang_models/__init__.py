"""Models of the tests, for SGLang's SGLANG_EXTERNAL_MODEL_PACKAGE."""
