"""What coordination is built from: sessions, mirrors, guarded writes, kept keys, groups. Speaks to any `Etcd`."""
