"""States of all ranks: saved, sent to a peer, loaded by another number of workers."""
