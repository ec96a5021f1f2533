"""Files that more than one package reads or writes; imports neither torch nor anything slow unless its name says so."""
