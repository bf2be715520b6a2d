"""Files of tuning records of schema 1, which lack the column `sizes`: what they hold, and how they are moved on to the next one."""

from __future__ import annotations

import sqlite3
from contextlib import suppress

NO_SIZES = "{}"  # a row's `sizes` where the workload has none beside those with columns of their own
_ADDED = " sizes,"  # among columns


def former_contents(columns: str, key: str) -> tuple[int, list[str]]:
    """The version of such a file and the SQL of its table; columns, key: of today's."""
    return 1, [f"CREATE TABLE candidates ({columns.replace(_ADDED, '')}, PRIMARY KEY ({key.replace(_ADDED, '')}))"]


def former_select(columns: str, table: str = "candidates") -> str:
    """What reads today's columns from such a file."""
    return f"SELECT {columns.replace(_ADDED, f' {NO_SIZES!r},')} FROM {table}"


def move_on(connection: sqlite3.Connection, table: str, columns: str, schema: int) -> None:
    """Makes such a file one of today's, all or nothing; table: the SQL that makes today's. Raises sqlite3.DatabaseError."""
    statements = (
        "ALTER TABLE candidates RENAME TO former",
        table,
        f"INSERT INTO candidates {former_select(columns, 'former')}",
        "DROP TABLE former",
        f"PRAGMA user_version = {schema}",
    )
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in statements:
            connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
