"""The cache inside inference servers. Nothing here is imported until a server asks for it."""
