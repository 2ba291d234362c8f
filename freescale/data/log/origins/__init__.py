"""Where the events of a log come from, a file a kind: files, Delta and Iceberg tables, topics of Kafka."""
