"""Everything that can be refused before a run starts; torch is imported only where a key needs it."""
