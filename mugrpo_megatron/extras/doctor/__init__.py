"""`mugrpo doctor`: checks the machine and its software."""
