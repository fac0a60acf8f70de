# flanneld's image, for any architecture that the base image has:
#
#     docker build -t localhost/flanneld:0.12.0-py1 .
#
# Another Debian 12 may take the base's place, a mirror's for example: --build-arg BASE=...
ARG BASE=docker.io/library/debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

# The plug-ins that pods need on hosts that have none.
FROM ${BASE} AS plug-ins
COPY dist/image/build-plugins /
RUN /build-plugins /plug-ins

# What needs the source, pip or a compiler happens here; all that the image gets of it is in /out.
FROM ${BASE} AS build
RUN apt-get update -q \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
        build-essential python3-dev python3-pip python3-venv
WORKDIR /source
# The constraints hold for the environments that pip builds in as well.
ENV PIP_CONSTRAINT=/source/dist/image/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY dist/image/constraints.txt dist/image/
COPY pyproject.toml README.md LICENSE ./
COPY flanneld/ flanneld/
RUN python3 -m venv --without-pip /opt/flanneld \
    && pip --python /opt/flanneld/bin/python install '.[iptables-legacy,kubernetes,metrics,nftables]'
COPY dist/ dist/
RUN install -D -t /out/opt/bin dist/mk-docker-opts.sh dist/image/install-conf dist/image/install-plugins \
    && ln -s /opt/flanneld/bin/flanneld /out/opt/bin/flanneld \
    && mkdir -p /out/usr/local/bin \
    && ln -s /opt/flanneld/bin/flannelctl /out/usr/local/bin/flannelctl \
    && mv /opt/flanneld /out/opt/ \
    && install dist/cni/flannel /out/flannel

FROM ${BASE}
LABEL org.opencontainers.image.title="flanneld" \
      org.opencontainers.image.description="flannel's daemon in Python" \
      org.opencontainers.image.licenses="Apache-2.0"
# iptables has both flavours, legacy and nft; libnftables is for EnableNFTables, strongSwan for the
# ipsec backend. The daemon itself needs no ip command: iproute2 and wireguard-tools
# are for whoever looks at routes and peers in the pod.
RUN apt-get update -q \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
        ca-certificates iproute2 iptables libnftables1 python3 wireguard-tools \
        libstrongswan-standard-plugins strongswan-charon strongswan-swanctl \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
COPY --from=build /out/ /
COPY --from=plug-ins /plug-ins/bin/ /opt/cni/bin/
COPY --from=plug-ins /plug-ins/copyright /usr/share/doc/containernetworking-plugins/
# It runs as root, since /run/flannel and /run/xtables.lock are root's on the host. Of root's powers it needs
# NET_ADMIN and NET_RAW.
ENTRYPOINT ["/opt/bin/flanneld"]
