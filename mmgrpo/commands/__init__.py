"""What the commands of `mmgrpo` do. Each module is imported when its command is called."""
