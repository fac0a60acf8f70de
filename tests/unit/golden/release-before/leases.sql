PRAGMA application_id=1718378862;
PRAGMA user_version=1;
BEGIN TRANSACTION;
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO "facts" VALUES('at',29227.536714462);
INSERT INTO "facts" VALUES('boot','d1593021-12bd-457d-a94f-2a41190aa5f6');
INSERT INTO "facts" VALUES('cluster','5602a24b7cd122b3');
INSERT INTO "facts" VALUES('floor',1454993561);
INSERT INTO "facts" VALUES('revision',1454993564);
INSERT INTO "facts" VALUES('secret','0000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "facts" VALUES('time',8.98841600064770318567e-03);
CREATE TABLE history (
    revision INTEGER PRIMARY KEY, action TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, expires REAL
);
INSERT INTO "history" VALUES(1454993562,'put','/coreos.com/network/config','{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}',NULL);
INSERT INTO "history" VALUES(1454993563,'put','/coreos.com/network/subnets/10.5.40.0-24','{"PublicIP":"192.0.2.11","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"5e:9e:99:14:a0:5c"}}',8.64000076607459923262e+04);
INSERT INTO "history" VALUES(1454993564,'put','/coreos.com/network/subnets/10.5.9.0-24','{"PublicIP":"192.0.2.31"}',NULL);
CREATE TABLE keys (
    key TEXT PRIMARY KEY, value TEXT NOT NULL, ttl INTEGER, expires REAL, modified INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "keys" VALUES('/coreos.com/network/config','{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}',NULL,NULL,1454993562);
INSERT INTO "keys" VALUES('/coreos.com/network/subnets/10.5.40.0-24','{"PublicIP":"192.0.2.11","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"5e:9e:99:14:a0:5c"}}',86400,8.64000076607459923262e+04,1454993563);
INSERT INTO "keys" VALUES('/coreos.com/network/subnets/10.5.9.0-24','{"PublicIP":"192.0.2.31"}',NULL,NULL,1454993564);
CREATE TABLE tokens (id TEXT PRIMARY KEY, ends INTEGER NOT NULL, is_revoked INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO "tokens" VALUES('522a3621',1795541176,0);
CREATE INDEX keys_by_expiry ON keys (expires) WHERE expires IS NOT NULL;
COMMIT;
