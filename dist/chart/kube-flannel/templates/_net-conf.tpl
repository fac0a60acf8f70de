{{- /* The network config: which value becomes which key depends on the backend. */ -}}
{{- define "net-conf" -}}
{{- $keys := dict
  "vxlan" (dict "backendPort" "Port" "vni" "VNI" "GBP" "GBP" "directRouting" "DirectRouting" "mtu" "MTU"
    "macPrefix" "MacPrefix")
  "wireguard" (dict "backendPort" "ListenPort" "backendPortv6" "ListenPortV6" "psk" "PSK" "mtu" "MTU"
    "tunnelMode" "Mode" "keepaliveInterval" "PersistentKeepaliveInterval")
  "ipsec" (dict "psk" "PSK" "udpEncap" "UDPEncap" "espProposal" "ESPProposal")
  "udp" (dict "backendPort" "Port") -}}
{{- $flannel := .Values.flannel -}}
{{- $backend := dict "Type" $flannel.backend -}}
{{- range $value, $key := get $keys $flannel.backend | default dict -}}
  {{- with get $flannel $value -}}
    {{- /* As in upstream's chart, a number may be given as text, and what is text as a number. */ -}}
    {{- $it := . -}}
    {{- if has $key (list "MacPrefix" "PSK" "Mode" "ESPProposal") }}{{ $it = toString . }}
    {{- else if kindIs "string" . }}{{ $it = (fromYaml (printf "it: %s" .)).it }}
    {{- end -}}
    {{- $_ := set $backend $key $it -}}
  {{- end -}}
{{- end -}}
{{- with $flannel.also }}{{ $_ := set $backend "Also" . }}
{{- end -}}
{{- $config := dict "EnableNFTables" (eq (toString $flannel.enableNFTables) "true") "Backend" $backend -}}
{{- if .Values.podCidr }}{{ $_ := set $config "Network" .Values.podCidr }}
{{- else }}{{ $_ := set $config "EnableIPv4" false }}
{{- end -}}
{{- if .Values.podCidrv6 }}{{ $_ := merge $config (dict "EnableIPv6" true "IPv6Network" .Values.podCidrv6) }}
{{- end -}}
{{- toPrettyJson $config -}}
{{- end -}}
