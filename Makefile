# The working loop: edit, `make test-quick`, push. Every target prepares .venv first; a second run finds it ready.
PYTHON = .venv/bin/python
QUICK = not process and not slow and not night

.PHONY: setup check test-quick test night seconds new-stack docs lock quickstart

setup:
	run_scripts/setup.sh
check: setup  # linter, formatter, type checker; contracts, and figures of the code to look at
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	$(PYTHON) -m run_scripts.dev.code_metrics
test-quick: setup  # starts no process, about 100 seconds
	$(PYTHON) -m pytest -q -n 2 -m "$(QUICK)"
test:  # what a change must pass: check and the whole suite
	run_scripts/test.sh
night: setup new-stack  # kill and scaling harnesses, comparisons with TRL, the report in a browser; then all properties
	$(PYTHON) -m pytest -m night --seconds=.pytest_cache/night.tsv
	$(PYTHON) -m pytest -q -n 2 -m "$(QUICK)" --hypothesis-profile thorough
seconds:  # what the tests of the last run and their fixtures cost
	$(PYTHON) -m tests.costs
new-stack:  # the quick tier, and the processes of learner and weights, where `setup.sh --stack new` has been run
	if [ -x .venv-new/bin/python ]; then .venv-new/bin/python -m pytest -q -n 2 -m "$(QUICK)" \
		&& .venv-new/bin/python -m pytest -q -n 2 -m "process and not night" tests/learner tests/weights; fi
docs: setup  # the pages that are made from the code, and the site in build/site: no network, no warning, no broken link
	$(PYTHON) -m run_scripts.dev.recipe_reference > docs/recipe.md
	$(PYTHON) -m run_scripts.dev.metrics_page > docs/metrics.md
	$(PYTHON) -m run_scripts.dev.site.cli_page > docs/cli.md
	$(PYTHON) -m run_scripts.dev.site.python_page > docs/python.md
	$(PYTHON) -m run_scripts.dev.site.recipes_page > docs/recipes.md
	$(PYTHON) -m run_scripts.dev.site.build
lock:  # every version of the CUDA environment, of the pinned stack and of the new one; needs uv
	for stack in "3.11 " "3.12 -new"; do set -- $$stack; \
		uv pip compile --quiet --python-version $$1 --python-platform x86_64-manylinux_2_34 --no-annotate \
		--custom-compile-command "make lock" --constraint run_scripts/constraints-cuda$$2.in \
		--extra cuda$$2 --extra dev --extra study --output-file run_scripts/constraints-cuda$$2.txt pyproject.toml || exit; \
	done
quickstart:
	run_scripts/quickstart.sh
