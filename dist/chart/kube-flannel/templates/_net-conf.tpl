{{- /* The network config: which value becomes which key depends on the backend. */ -}}
{{- define "net-conf" -}}
{{- $keys := dict
  "vxlan" (dict "backendPort" "Port" "vni" "VNI" "GBP" "GBP" "directRouting" "DirectRouting" "mtu" "MTU"
    "macPrefix" "MacPrefix")
  "wireguard" (dict "backendPort" "ListenPort" "backendPortv6" "ListenPortV6" "psk" "PSK" "mtu" "MTU"
    "tunnelMode" "Mode" "keepaliveInterval" "PersistentKeepaliveInterval")
  "udp" (dict "backendPort" "Port") -}}
{{- $flannel := .Values.flannel -}}
{{- $backend := dict "Type" $flannel.backend -}}
{{- range $value, $key := get $keys $flannel.backend | default dict -}}
  {{- with get $flannel $value }}{{ $_ := set $backend $key . }}{{ end -}}
{{- end -}}
{{- $config := dict "EnableNFTables" $flannel.enableNFTables "Backend" $backend -}}
{{- if .Values.podCidr }}{{ $_ := set $config "Network" .Values.podCidr }}
{{- else }}{{ $_ := set $config "EnableIPv4" false }}
{{- end -}}
{{- if .Values.podCidrv6 }}{{ $_ := merge $config (dict "EnableIPv6" true "IPv6Network" .Values.podCidrv6) }}
{{- end -}}
{{- toPrettyJson $config -}}
{{- end -}}
