"""Sockets and HTTP: connections that can be cut, servers, clients, and readers with a time limit."""
