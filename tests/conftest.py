from jaxtyping import install_import_hook

# Shapes and types are checked in the tests, not for users; the hook must come before the package.
hook = install_import_hook("mhalearn", "beartype.beartype")
