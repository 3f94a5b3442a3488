"""Memory that ranks share and the words of the protocol: signals, workspaces, the copy engine, the board."""
