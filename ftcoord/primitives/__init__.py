"""The building blocks of coordination: sessions, mirrors, guarded writes, kept keys, groups. They work with any
`Etcd`."""
