"""`python -m swarmtrain`."""

from swarmtrain.cli.main import main

if __name__ == "__main__":
    main()
