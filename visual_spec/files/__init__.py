"""Files as everything else reads and writes them: names inside a folder, records of JSON, whole writing."""
